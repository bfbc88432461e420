/* Whether a text is JSON that our readers take, for those who write and have no reader. */
#ifndef EVEN_BASE_JSON_CHECK_H
#define EVEN_BASE_JSON_CHECK_H

#include <evenstep/status.h>

/* EVEN_ERR_ARGUMENT, with the place, unless `text` is one JSON object (RFC 8259) in valid UTF-8, at most 512 levels
 * deep, its integers within 64 bits, its strings without NUL. `what` goes into the error. Equal keys are not looked
 * for. Allocates nothing. */
even_status even_json_check_object(const char *what, const char *text) EVEN_MUST_USE;

#endif
