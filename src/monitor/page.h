/* The pages of ui/, embedded when the program is built. */
#ifndef EVEN_MONITOR_PAGE_H
#define EVEN_MONITOR_PAGE_H

#include "base/text.h"

#include <stddef.h>

extern const unsigned char even_page_html[];
extern const size_t even_page_html_bytes;
extern const unsigned char even_bench_html[];
extern const size_t even_bench_html_bytes;

/* The page as the server sends it: it fetches what it shows. */
void even_page_live(even_text *out);
/* The page with its data inside: `json` is put into a script element, escaped so that nothing in it can end that. */
void even_page_with_data(const char *json, even_text *out);
/* The same of the page that shows what `evenstep bench balance` measured. */
void even_page_of_bench(const char *json, even_text *out);

#endif
