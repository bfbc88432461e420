/* jansson with Evenstep's errors. */
#include "base/json_reader.h"

#include "base/fail.h"

even_status even_json_parse(const char *origin, const char *text, size_t bytes, json_t **out) {
  json_error_t error;
  *out = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
  if (*out == NULL) {
    return even_fail(EVEN_ERR_INPUT, "%s is not valid JSON: line %d, column %d: %s", origin, error.line, error.column,
                     error.text);
  }
  return EVEN_OK;
}

const char *even_json_text(const json_t *object, const char *name) {
  const char *text = json_string_value(json_object_get(object, name));
  return text == NULL ? "" : text;
}
