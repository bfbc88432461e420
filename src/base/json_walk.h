/* Reads JSON without jansson, for the core, which has libc only: walks over a text that even_json_check_object took.
 * Over any other text it may leave it. */
#ifndef EVEN_BASE_JSON_WALK_H
#define EVEN_BASE_JSON_WALK_H

#include <stdbool.h>
#include <stddef.h>

/* A place in the text: a value, or between the members of an object or the elements of an array. */
typedef struct even_json_walk {
  const char *at;
} even_json_walk;

/* The value that the text is. */
even_json_walk even_json_walk_begin(const char *text);
/* The first place inside an object ('{') or an array ('['); false where the value is none. */
bool even_json_walk_enter(even_json_walk value, char bracket, even_json_walk *inside);
/* The next member of an object, and moves past it; false behind the last. A name that `room` bytes do not hold comes as
 * "". */
bool even_json_walk_member(even_json_walk *inside, char *name, size_t room, even_json_walk *value);
/* The next element of an array, and moves past it; false behind the last. */
bool even_json_walk_element(even_json_walk *inside, even_json_walk *value);
/* A string's content in UTF-8; false where the value is none, or longer than `room` bytes hold with its NUL. */
bool even_json_walk_string(even_json_walk value, char *out, size_t room);
/* A number; false where the value is none. */
bool even_json_walk_number(even_json_walk value, double *out);

#endif
