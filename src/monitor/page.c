/* Putting data into the page. */
#include "monitor/page.h"

#include "base/fail.h"

#include <string.h>

/* What stands in the page where the data go; JavaScript reads it as null. */
static const char place[] = "/*EVENSTEP_DATA*/null";

void even_page_live(even_text *out) {
  even_text_append(out, (const char *)even_page_html, even_page_html_bytes);
}

/* "</script>" and "<!--" end or change a script element wherever they stand, so no "<" stays; ">" and "&" are harmless
 * but go too; U+2028 and U+2029 end a line in older JavaScript. All are valid inside JSON strings as \u escapes, and
 * stand nowhere else in JSON. */
static void add_escaped(const char *json, even_text *out) {
  const char *plain = json;
  for (const char *at = json; *at != '\0'; at++) {
    const char *escape = *at == '<' ? "\\u003c" : *at == '>' ? "\\u003e" : *at == '&' ? "\\u0026" : NULL;
    size_t length = 1;
    if (strncmp(at, "\xe2\x80\xa8", 3) == 0 || strncmp(at, "\xe2\x80\xa9", 3) == 0) {
      escape = at[2] == '\xa8' ? "\\u2028" : "\\u2029";
      length = 3;
    }
    if (escape != NULL) {
      even_text_append(out, plain, (size_t)(at - plain));
      even_text_add(out, escape);
      plain = at + length;
      at += length - 1;
    }
  }
  even_text_add(out, plain);
}

static void add_page(const unsigned char *html, size_t bytes, const char *json, even_text *out) {
  const char *page = (const char *)html;
  const char *found = memmem(page, bytes, place, sizeof place - 1);
  if (found == NULL) {
    out->status = even_fail(EVEN_ERR_STATE, "the page of this build has no place for data");
    return;
  }
  size_t before = (size_t)(found - page);
  size_t after = before + sizeof place - 1;
  even_text_append(out, page, before);
  add_escaped(json, out);
  even_text_append(out, page + after, bytes - after);
}

void even_page_with_data(const char *json, even_text *out) {
  add_page(even_page_html, even_page_html_bytes, json, out);
}

void even_page_of_bench(const char *json, even_text *out) {
  add_page(even_bench_html, even_bench_html_bytes, json, out);
}
