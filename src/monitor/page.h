/* The page of ui/, embedded when the program is built. */
#ifndef EVEN_MONITOR_PAGE_H
#define EVEN_MONITOR_PAGE_H

#include "base/text.h"

#include <stddef.h>

extern const unsigned char even_page_html[];
extern const size_t even_page_html_bytes;

/* The page as the server sends it: it fetches what it shows. */
void even_page_live(even_text *out);
/* The page with its data inside: `json` is put into a script element, escaped so that nothing in it can end that. */
void even_page_with_data(const char *json, even_text *out);

#endif
