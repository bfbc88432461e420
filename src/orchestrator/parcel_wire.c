/* Notes of parcels, to JSON and back. */
#include "orchestrator/parcel_wire.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { SUM_DIGITS = 16 };

void even_parcel_note_write(const even_parcel_note *note, even_text *out) {
  char digits[SUM_DIGITS + 1];
  even_json json = even_json_begin(out, 0);
  even_json_object(&json, NULL);
  if (note->kind == EVEN_MESSAGE_PARCEL_GONE) {
    even_json_integer(&json, "host", note->host);
    even_json_object_end(&json);
    return;
  }
  even_json_integer(&json, "from", note->parcel.from);
  even_json_integer(&json, "to", note->parcel.to);
  even_json_unsigned(&json, "id", note->id);
  if (note->kind == EVEN_MESSAGE_PARCEL) {
    even_json_string(&json, "name", note->parcel.name);
    even_json_unsigned(&json, "number", note->parcel.number);
    even_json_unsigned(&json, "bytes", note->parcel.bytes);
  } else if (note->kind == EVEN_MESSAGE_PARCEL_END) {
    even_json_bool(&json, "back", note->back);
    even_json_integer(&json, "status", note->why.status);
    even_json_string(&json, "what", note->why.what);
    even_json_string(&json, "fix", note->why.fix);
  } else {
    even_json_unsigned(&json, "at", note->at);
  }
  if (note->kind == EVEN_MESSAGE_PIECE && note->last) {
    (void)snprintf(digits, sizeof digits, "%016" PRIx64, note->sum);
    even_json_string(&json, "sum", digits);
  }
  even_json_object_end(&json);
}

/* ---- reading ---- */

static even_status not_right(const char *name) {
  return even_fail(EVEN_ERR_INPUT, "a message of a parcel without a proper \"%s\"", name);
}

static even_status read_number(const json_t *content, const char *name, json_int_t least, json_int_t most,
                               json_int_t *out) {
  const json_t *value = json_object_get(content, name);
  *out = json_integer_value(value);
  return json_is_integer(value) && *out >= least && *out <= most ? EVEN_OK : not_right(name);
}

static even_status read_count(const json_t *content, const char *name, uint64_t *out) {
  json_int_t value = 0;
  EVEN_TRY(read_number(content, name, 0, INT64_MAX, &value));
  *out = (uint64_t)value;
  return EVEN_OK;
}

static even_status read_host(const json_t *content, const char *name, int count, int *out) {
  json_int_t value = 0;
  EVEN_TRY(read_number(content, name, 0, count - 1, &value));
  *out = (int)value;
  return EVEN_OK;
}

static even_status read_offer(const json_t *content, even_parcel *out) {
  const char *name = json_string_value(json_object_get(content, "name"));
  if (name == NULL || name[0] == '\0' || strlen(name) >= sizeof out->name) {
    return not_right("name");
  }
  memcpy(out->name, name, strlen(name) + 1);
  EVEN_TRY(read_count(content, "number", &out->number));
  EVEN_TRY(read_count(content, "bytes", &out->bytes));
  return out->bytes > 0 ? EVEN_OK : not_right("bytes");
}

static even_status read_sum(const json_t *content, even_parcel_note *out) {
  const char *digits = json_string_value(json_object_get(content, "sum"));
  out->last = digits != NULL;
  if (digits != NULL && (strlen(digits) != SUM_DIGITS || strspn(digits, "0123456789abcdef") != SUM_DIGITS)) {
    return not_right("sum");
  }
  out->sum = digits == NULL ? 0 : strtoumax(digits, NULL, 16);
  return EVEN_OK;
}

/* A status that this version does not know is some failure all the same: agents of one job are of one version. */
static even_status read_end(const json_t *content, even_parcel_note *out) {
  json_int_t status = 0;
  EVEN_TRY(read_number(content, "status", EVEN_OK, EVEN_ERR_INTERRUPTED, &status));
  out->back = json_is_true(json_object_get(content, "back"));
  out->why = (even_error){.status = (even_status)status, .rank = -1, .file = ""};
  (void)snprintf(out->why.what, sizeof out->why.what, "%s", even_json_text(content, "what"));
  (void)snprintf(out->why.fix, sizeof out->why.fix, "%s", even_json_text(content, "fix"));
  return EVEN_OK;
}

static even_status read_note(const json_t *content, int count, even_parcel_note *out) {
  if (out->kind == EVEN_MESSAGE_PARCEL_GONE) {
    return read_host(content, "host", count, &out->host);
  }
  EVEN_TRY(read_host(content, "from", count, &out->parcel.from));
  EVEN_TRY(read_host(content, "to", count, &out->parcel.to));
  EVEN_TRY(read_count(content, "id", &out->id));
  if (out->parcel.from == out->parcel.to || out->id == 0) {
    return not_right("id");
  }
  switch (out->kind) {
    case EVEN_MESSAGE_PARCEL:
      return read_offer(content, &out->parcel);
    case EVEN_MESSAGE_PIECE:
      EVEN_TRY(read_count(content, "at", &out->at));
      return read_sum(content, out);
    case EVEN_MESSAGE_PARCEL_TAKE:
      out->back = true;
      return read_count(content, "at", &out->at);
    default:
      return read_end(content, out);
  }
}

even_status even_parcel_note_read(const even_message *message, int count, even_parcel_note *out) {
  json_t *content = NULL;
  *out = (even_parcel_note){.kind = message->kind};
  EVEN_TRY(even_json_parse("what is said of a parcel", message->json, message->json_bytes, &content));
  even_status status = read_note(content, count, out);
  json_decref(content);
  return status;
}
