/* Text that may not be the UTF-8 that it should be: what a process printed, a name on a disk, a cut line. */
#ifndef EVEN_BASE_UTF8_H
#define EVEN_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>

/* What stands in the place of bytes that are no character (U+FFFD). */
#define EVEN_UTF8_REPLACEMENT "\xEF\xBF\xBD"

/* The bytes of the character at the start of a NUL-terminated text, 1 to 4; 0: it is none (RFC 3629: not cut off, not
 * longer than it has to be, no surrogate, not above U+10FFFF) or the text ends. */
size_t even_utf8_character(const char *text);
bool even_utf8_valid(const char *text);
/* Takes a character that was cut in two from the end of the text. */
void even_utf8_trim(char *text);
/* The text with "?" for each control character and each byte that is no character, cut at a whole character to what
 * `out` holds, NUL included: fit for a terminal, JSON and a page, whatever wrote it. Returns out. */
const char *even_utf8_clean(const char *text, char *out, size_t room);

#endif
