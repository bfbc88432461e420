/* Slurm's lists of hosts. The form is that of `man scontrol`, "show hostlist". */
#include "orchestrator/hostlist.h"

#include "base/alloc.h"
#include "base/fail.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { MOST_DIGITS = 9 };

/* The name as far as it is written out, and what of the list is still to come. */
typedef struct beginning {
  char name[EVEN_HOSTS_NAME];
  size_t length;
} beginning;

static even_status no_list(const char *why) {
  return even_fail(EVEN_ERR_INPUT, "a list of hosts that cannot be read: %s", why);
}

static bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
}

static even_status add_name(even_hostlist *list, const beginning *so_far) {
  if (so_far->length == 0) {
    return no_list("a name without letters");
  }
  if (list->count == EVEN_HOSTS_MOST) {
    return no_list("too many hosts");
  }
  if (list->count % 8 == 0) { /* eight at a time */
    EVEN_TRY(even_realloc((void **)&list->names, list->count + 8, sizeof *list->names));
  }
  memset(list->names[list->count], 0, sizeof list->names[0]);
  memcpy(list->names[list->count++], so_far->name, so_far->length);
  return EVEN_OK;
}

static even_status read_number(const char **at, long *out, int *digits) {
  *out = 0;
  *digits = 0;
  while (**at >= '0' && **at <= '9') {
    if (++*digits > MOST_DIGITS) {
      return no_list("a number of many digits");
    }
    *out = *out * 10 + (*(*at)++ - '0');
  }
  return *digits > 0 ? EVEN_OK : no_list("a bracket without a number");
}

static even_status expand(even_hostlist *list, beginning so_far, const char *at);

/* One of "3", "08-10", with what follows the bracket; *at goes behind it. */
static even_status expand_range(even_hostlist *list, const beginning *so_far, const char **at, const char *behind) {
  long first = 0;
  long last = 0;
  int digits = 0;
  int last_digits = 0;
  EVEN_TRY(read_number(at, &first, &digits));
  last = first;
  if (**at == '-') {
    (*at)++;
    EVEN_TRY(read_number(at, &last, &last_digits));
  }
  if (last < first) {
    return no_list("a range that ends before it begins");
  }
  for (long number = first; number <= last; number++) {
    char text[32];
    beginning next = *so_far;
    int length = snprintf(text, sizeof text, "%0*ld", digits, number);
    if (length < 0 || next.length + (size_t)length >= sizeof next.name) {
      return no_list("a long name");
    }
    memcpy(next.name + next.length, text, (size_t)length);
    next.length += (size_t)length;
    EVEN_TRY(expand(list, next, behind));
  }
  return EVEN_OK;
}

static even_status expand_bracket(even_hostlist *list, const beginning *so_far, const char *at) {
  const char *end = strchr(at, ']');
  if (end == NULL) {
    return no_list("a bracket that does not end");
  }
  for (;;) {
    EVEN_TRY(expand_range(list, so_far, &at, end + 1));
    if (at == end) {
      return EVEN_OK;
    }
    if (*at++ != ',') {
      return no_list("a bracket with more than numbers");
    }
  }
}

/* All names that begin so, up to the item's end. As deep as there are brackets, each of which makes the name longer. */
static even_status expand(even_hostlist *list, beginning so_far, const char *at) {
  while (is_letter(*at)) {
    if (so_far.length + 1 >= sizeof so_far.name) {
      return no_list("a long name");
    }
    so_far.name[so_far.length++] = *at++;
  }
  if (*at == '[') {
    return expand_bracket(list, &so_far, at + 1);
  }
  return *at == '\0' || *at == ',' ? add_name(list, &so_far) : no_list("a sign that no name has");
}

/* Behind the comma that ends the item, NULL where the list does. */
static const char *next_item(const char *at) {
  bool inside = false;
  for (; *at != '\0'; at++) {
    inside = *at == '[' || (inside && *at != ']');
    if (*at == ',' && !inside) {
      return at + 1;
    }
  }
  return NULL;
}

even_status even_hostlist_expand(const char *text, even_hostlist *out) {
  *out = (even_hostlist){NULL, 0};
  for (const char *at = text; at != NULL; at = next_item(at)) {
    const beginning none = {.length = 0};
    EVEN_TRY(expand(out, none, at));
  }
  return EVEN_OK;
}

void even_hostlist_free(even_hostlist *list) {
  even_free(list->names);
  *list = (even_hostlist){NULL, 0};
}
