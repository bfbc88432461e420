/* Cutting a stream of bytes into messages. */
#include "orchestrator/message.h"

#include "base/fail.h"

#include <string.h>

typedef struct limits {
  uint32_t json;
  uint32_t data;
  bool known;
} limits;

static limits limits_of(uint32_t kind) {
  static const limits all[] = {
#define MESSAGE_LIMITS(name, number, json, data) [number] = {(json), (data), true},
      EVEN_MESSAGE_LIST(MESSAGE_LIMITS)
#undef MESSAGE_LIMITS
  };
  return kind < sizeof all / sizeof all[0] ? all[kind] : (limits){0, 0, false};
}

static uint32_t read_number(const unsigned char *bytes) {
  return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static void write_number(unsigned char *bytes, uint32_t value) {
  for (int i = 0; i < 4; i++) {
    bytes[i] = (unsigned char)(value >> 8 * i);
  }
}

even_status even_message_next(const unsigned char *bytes, size_t count, even_message *out, size_t *used,
                              size_t *wanted) {
  *used = 0;
  *wanted = EVEN_MESSAGE_HEAD;
  if (count < EVEN_MESSAGE_HEAD) {
    return EVEN_OK;
  }
  uint32_t kind = read_number(bytes);
  uint32_t json = read_number(bytes + 4);
  uint32_t data = read_number(bytes + 8);
  limits most = limits_of(kind);
  if (!most.known) {
    return even_fail(EVEN_ERR_INPUT, "a message of the unknown kind %u", kind);
  }
  if (json > most.json || data > most.data) {
    return even_fail(EVEN_ERR_INPUT, "a message of kind %u with %u bytes of JSON and %u of data, beyond its limits",
                     kind, json, data);
  }
  *wanted = EVEN_MESSAGE_HEAD + (size_t)json + data;
  if (count < *wanted) {
    return EVEN_OK;
  }
  *out = (even_message){.kind = (even_message_kind)kind,
                        .json = (const char *)bytes + EVEN_MESSAGE_HEAD,
                        .json_bytes = json,
                        .data = bytes + EVEN_MESSAGE_HEAD + json,
                        .data_bytes = data};
  *used = *wanted;
  return EVEN_OK;
}

even_status even_message_add(even_text *out, even_message_kind kind, const char *json, size_t json_bytes,
                             const void *data, size_t data_bytes) {
  unsigned char head[EVEN_MESSAGE_HEAD];
  limits most = limits_of((uint32_t)kind);
  if (!most.known || json_bytes > most.json || data_bytes > most.data) {
    return even_fail(EVEN_ERR_OVERFLOW, "a message of kind %d with %zu bytes of JSON and %zu of data", (int)kind,
                     json_bytes, data_bytes);
  }
  write_number(head, (uint32_t)kind);
  write_number(head + 4, (uint32_t)json_bytes);
  write_number(head + 8, (uint32_t)data_bytes);
  even_text_append(out, (const char *)head, sizeof head);
  if (json_bytes > 0) {
    even_text_append(out, json, json_bytes);
  }
  if (data_bytes > 0) {
    even_text_append(out, data, data_bytes);
  }
  return even_text_status(out);
}

size_t even_message_most_data(even_message_kind kind) {
  return limits_of((uint32_t)kind).data;
}
