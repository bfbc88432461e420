/* A JSON writer without state beyond depth and a comma. */
#include "base/json_writer.h"

#include "base/utf8.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

even_json even_json_begin(even_text *text, int indent) {
  return (even_json){.text = text, .indent = indent};
}

static void line_break(even_json *json) {
  if (json->indent == 0) {
    return;
  }
  even_text_add(json->text, "\n");
  for (int i = 0; i < json->depth * json->indent; i++) {
    even_text_append(json->text, " ", 1);
  }
}

/* Returns the bytes of `value` that it stands for. */
static size_t character(even_text *text, const char *value) {
  size_t bytes = even_utf8_character(value);
  if (bytes == 0) {
    even_text_add(text, EVEN_UTF8_REPLACEMENT); /* no reader of JSON takes anything else */
    return 1;
  }
  if ((unsigned char)value[0] < 0x20) {
    even_text_format(text, "\\u%04x", (unsigned char)value[0]);
  } else {
    even_text_append(text, value, bytes);
  }
  return bytes;
}

static void quoted(even_json *json, const char *value) {
  even_text *text = json->text;
  size_t bytes = 1;
  even_text_append(text, "\"", 1);
  for (const char *at = value; *at != '\0'; at += bytes) {
    bytes = 1;
    switch (*at) {
      case '"':
        even_text_add(text, "\\\"");
        break;
      case '\\':
        even_text_add(text, "\\\\");
        break;
      case '\n':
        even_text_add(text, "\\n");
        break;
      case '\r':
        even_text_add(text, "\\r");
        break;
      case '\t':
        even_text_add(text, "\\t");
        break;
      default:
        bytes = character(text, at);
    }
  }
  even_text_append(text, "\"", 1);
}

static void before_value(even_json *json, const char *key) {
  if (json->need_comma) {
    even_text_append(json->text, ",", 1);
  }
  if (json->depth > 0) {
    line_break(json);
  }
  if (key != NULL) {
    quoted(json, key);
    even_text_add(json->text, json->indent > 0 ? ": " : ":");
  }
  json->need_comma = true;
}

static void open_scope(even_json *json, const char *key, const char *bracket) {
  before_value(json, key);
  even_text_add(json->text, bracket);
  json->depth++;
  json->need_comma = false;
}

static void close_scope(even_json *json, const char *bracket) {
  bool had_members = json->need_comma;
  json->depth--;
  if (had_members) {
    line_break(json);
  }
  even_text_add(json->text, bracket);
  json->need_comma = true;
}

void even_json_object(even_json *json, const char *key) {
  open_scope(json, key, "{");
}
void even_json_object_end(even_json *json) {
  close_scope(json, "}");
}
void even_json_array(even_json *json, const char *key) {
  open_scope(json, key, "[");
}
void even_json_array_end(even_json *json) {
  close_scope(json, "]");
}

void even_json_string(even_json *json, const char *key, const char *value) {
  before_value(json, key);
  if (value == NULL) {
    even_text_add(json->text, "null");
  } else {
    quoted(json, value);
  }
}

void even_json_integer(even_json *json, const char *key, int64_t value) {
  before_value(json, key);
  even_text_format(json->text, "%" PRId64, value);
}

void even_json_unsigned(even_json *json, const char *key, uint64_t value) {
  before_value(json, key);
  even_text_format(json->text, "%" PRIu64, value);
}

void even_json_number(even_json *json, const char *key, double value) {
  char digits[40];
  before_value(json, key);
  if (!isfinite(value)) {
    even_text_add(json->text, "null");
    return;
  }
  for (int precision = 6; precision <= 17; precision++) {
    (void)snprintf(digits, sizeof digits, "%.*g", precision, value);
    if (strtod(digits, NULL) == value) {
      break;
    }
  }
  even_text_add(json->text, digits);
}

void even_json_bool(even_json *json, const char *key, bool value) {
  before_value(json, key);
  even_text_add(json->text, value ? "true" : "false");
}

void even_json_null(even_json *json, const char *key) {
  before_value(json, key);
  even_text_add(json->text, "null");
}

void even_json_raw(even_json *json, const char *key, const char *value) {
  before_value(json, key);
  even_text_add(json->text, value);
}
