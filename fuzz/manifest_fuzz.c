/* Any bytes as a manifest, as they are and with a right checksum behind them: an error or sound numbers. */
#include "base/text.h"
#include "checkpoint/manifest_writer.h"
#include "checkpoint/reader.h"

#include <evenstep/checkpoint.h>
#include <inttypes.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void parse(const char *text, size_t size) {
  even_checkpoint_info info;
  even_status status = even_manifest_parse("fuzz", text, size, &info);
  for (size_t i = 0; status == EVEN_OK && i < info.file_count; i++) {
    const even_checkpoint_stored_file *file = &info.files[i];
    uint64_t chunks = file->bytes / file->chunk_bytes + (file->bytes % file->chunk_bytes != 0);
    if (file->sum_count != chunks || file->bytes > info.bytes) {
      abort();
    }
  }
  even_checkpoint_info_free(&info);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  even_text text = EVEN_TEXT_EMPTY;
  parse((const char *)data, size);
  even_text_append(&text, (const char *)data, size);
  even_text_format(&text, "%s%016" PRIx64 "%s", EVEN_MANIFEST_TAIL, even_checkpoint_checksum(data, size),
                   EVEN_MANIFEST_END);
  parse(even_text_string(&text), text.length);
  even_text_free(&text);
  return 0;
}
