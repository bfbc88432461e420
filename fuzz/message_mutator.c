/* Changes mostly the JSON of one message among those of an input: its length in the head is right again then, and the
 * messages behind it are what they were. */
#include "orchestrator/message.h"

#include <stdlib.h>
#include <string.h>

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most); /* libFuzzer's */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed);

enum { MOST_MESSAGES = 16, JSON_AT = 4, DATA_AT = 8 };

static size_t length_at(const uint8_t *data) {
  return data[0] | (size_t)data[1] << 8 | (size_t)data[2] << 16 | (size_t)data[3] << 24;
}

/* Where the messages begin that are whole. */
static size_t find(const uint8_t *data, size_t size, size_t *begins) {
  size_t count = 0;
  size_t at = 0;
  while (count < MOST_MESSAGES && size - at >= EVEN_MESSAGE_HEAD) {
    size_t rest = size - at - EVEN_MESSAGE_HEAD;
    size_t json = length_at(data + at + JSON_AT);
    size_t bytes = length_at(data + at + DATA_AT);
    if (json > rest || bytes > rest - json) {
      break;
    }
    begins[count++] = at;
    at += EVEN_MESSAGE_HEAD + json + bytes;
  }
  return count;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
  size_t begins[MOST_MESSAGES];
  size_t count = find(data, size, begins);
  if (seed % 4 == 0 || count == 0 || most < size) {
    return LLVMFuzzerMutate(data, size, most);
  }
  uint8_t *head = data + begins[seed / 4 % count];
  uint8_t *json = head + EVEN_MESSAGE_HEAD;
  size_t bytes = length_at(head + JSON_AT);
  size_t behind = (size_t)(data + size - (json + bytes));
  uint8_t *kept = malloc(behind + 1);
  if (kept == NULL) {
    return size;
  }
  memcpy(kept, json + bytes, behind);
  size_t now = LLVMFuzzerMutate(json, bytes, bytes + most - size);
  memcpy(json + now, kept, behind);
  free(kept);
  for (unsigned i = 0; i < 4; i++) {
    head[JSON_AT + i] = (uint8_t)(now >> (8 * i));
  }
  return (size_t)(json - data) + now + behind;
}
