/* Writes JSON (RFC 8259) into a text. Commas and quotes are its affair; a NaN or
 * an infinity becomes null. Reading JSON is jansson's, in the program. */
#ifndef EVEN_BASE_JSON_WRITER_H
#define EVEN_BASE_JSON_WRITER_H

#include "base/text.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct even_json {
  even_text *text;
  int depth;
  int indent; /* spaces a level; 0 writes one line */
  bool need_comma;
} even_json;

even_json even_json_begin(even_text *text, int indent);
/* key is NULL inside an array and at the top, a member's name inside an object. */
void even_json_object(even_json *json, const char *key);
void even_json_object_end(even_json *json);
void even_json_array(even_json *json, const char *key);
void even_json_array_end(even_json *json);
void even_json_string(even_json *json, const char *key, const char *value); /* NULL: null */
void even_json_integer(even_json *json, const char *key, int64_t value);
void even_json_unsigned(even_json *json, const char *key, uint64_t value);
void even_json_number(even_json *json, const char *key, double value); /* shortest that reads back */
void even_json_bool(even_json *json, const char *key, bool value);
void even_json_null(even_json *json, const char *key);
/* `value` is JSON already. */
void even_json_raw(even_json *json, const char *key, const char *value);

#endif
