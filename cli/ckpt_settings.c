/* What differs between two JSON values. */
#include "cli/ckpt.h"

typedef struct walk {
  even_text path;
  even_json_difference *told;
  void *context;
} walk;

static even_status compare(walk *on, const json_t *a, const json_t *b);

static even_status compare_child(walk *on, const char *name, const json_t *a, const json_t *b) {
  size_t before = on->path.length;
  even_text_format(&on->path, "%s%s", before == 0 ? "" : ".", name);
  even_status status = even_text_status(&on->path);
  if (status == EVEN_OK) {
    status = compare(on, a, b);
    on->path.length = before;
    on->path.data[before] = '\0';
  }
  return status;
}

static even_status compare_objects(walk *on, const json_t *a, const json_t *b) {
  even_status status = EVEN_OK;
  /* the iterators of jansson take no const */
  for (void *at = json_object_iter((json_t *)(uintptr_t)a); at != NULL && status == EVEN_OK;
       at = json_object_iter_next((json_t *)(uintptr_t)a, at)) {
    const char *name = json_object_iter_key(at);
    status = compare_child(on, name, json_object_iter_value(at), json_object_get(b, name));
  }
  for (void *at = json_object_iter((json_t *)(uintptr_t)b); at != NULL && status == EVEN_OK;
       at = json_object_iter_next((json_t *)(uintptr_t)b, at)) {
    const char *name = json_object_iter_key(at);
    if (json_object_get(a, name) == NULL) {
      status = compare_child(on, name, NULL, json_object_iter_value(at));
    }
  }
  return status;
}

static even_status compare_arrays(walk *on, const json_t *a, const json_t *b) {
  even_status status = EVEN_OK;
  size_t count = json_array_size(a) > json_array_size(b) ? json_array_size(a) : json_array_size(b);
  for (size_t i = 0; i < count && status == EVEN_OK; i++) {
    char name[24];
    (void)snprintf(name, sizeof name, "%zu", i);
    status = compare_child(on, name, json_array_get(a, i), json_array_get(b, i)); /* NULL behind its end */
  }
  return status;
}

static even_status compare(walk *on, const json_t *a, const json_t *b) {
  if (json_is_object(a) && json_is_object(b)) {
    return compare_objects(on, a, b);
  }
  if (json_is_array(a) && json_is_array(b)) {
    return compare_arrays(on, a, b);
  }
  if (a == NULL || b == NULL || json_equal(a, b) == 0) {
    on->told(on->context, even_text_string(&on->path), a, b);
  }
  return EVEN_OK;
}

even_status even_json_compare(const char *prefix, const json_t *a, const json_t *b, even_json_difference *told,
                              void *context) {
  walk on = {.path = EVEN_TEXT_EMPTY, .told = told, .context = context};
  even_text_add(&on.path, prefix);
  even_status status = even_text_status(&on.path);
  if (status == EVEN_OK) {
    status = compare(&on, a, b);
  }
  even_text_free(&on.path);
  return status;
}
