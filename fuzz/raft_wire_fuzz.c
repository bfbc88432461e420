/* What members of the voters' group say of their log: what is read is written as the same bytes. */
#include "orchestrator/raft_wire.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  struct raft_message message;
  even_text text = EVEN_TEXT_EMPTY;
  if (even_raft_wire_read(data, size, &message) != EVEN_OK) {
    return 0;
  }
  if (even_raft_wire_write(&message, &text) != EVEN_OK || text.length != size || memcmp(text.data, data, size) != 0) {
    abort();
  }
  even_raft_wire_drop(&message);
  even_text_free(&text);
  return 0;
}
