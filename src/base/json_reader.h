/* Reads JSON with jansson (program side only) and says where a file is wrong. */
#ifndef EVEN_BASE_JSON_READER_H
#define EVEN_BASE_JSON_READER_H

#include <evenstep/status.h>
#include <jansson.h>

/* Parses `text`; `origin` (a path or a name) is put into the error. json_decref *out. EVEN_ERR_INPUT with line and
 * column. */
even_status even_json_parse(const char *origin, const char *text, size_t bytes, json_t **out) EVEN_MUST_USE;
/* The text of that name in an object; "" for none. */
const char *even_json_text(const json_t *object, const char *name);

#endif
