/* Any bytes as the header of a safetensors file: an error or a header that holds; never a crash. */
#include "checkpoint/reader.h"

#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  json_t *header = NULL;
  if (size < 2) {
    return 0;
  }
  uint64_t data_bytes = (uint64_t)data[0] << 8 | data[1];
  even_status status = even_safetensors_parse("fuzz", (const char *)data + 2, size - 2, data_bytes, &header);
  if ((status == EVEN_OK) != (header != NULL) || (status != EVEN_OK && status != EVEN_ERR_CORRUPT)) {
    abort();
  }
  json_decref(header);
  return 0;
}
