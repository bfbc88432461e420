/* Parameter structs that grow. */
#include "base/params.h"

#include "base/fail.h"

#include <evenstep/version.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* No struct of ours comes near it: a larger number is none that sizeof gave, and neither is one that is no multiple of
 * the alignment of the first member. */
#define MOST_BYTES ((size_t)1024)

static bool is_zero(const unsigned char *bytes, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (bytes[i] != 0) {
      return false;
    }
  }
  return true;
}

/* Asks, in bytes that this library does not know, for what it does not have. */
static even_status asks_for_more(const char *name, const char *which) {
  (void)even_fail(EVEN_ERR_ARGUMENT, "%s asks in %s for what this library, version %s, does not have yet", name, which,
                  even_version());
  return even_error_fix("install the library that belongs to the headers of this program, or leave the new members 0");
}

even_status even_params_check_reserved(const char *name, const void *reserved, size_t bytes) {
  return is_zero(reserved, bytes) ? EVEN_OK : asks_for_more(name, "its last member, `reserved`,");
}

even_status even_params_take(const char *name, void *own, size_t bytes, size_t least, const void *given) {
  size_t size = 0;
  if (given == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "no %s are given", name);
  }
  memcpy(&size, given, sizeof size);
  if (size < least || size > MOST_BYTES || size % sizeof size != 0) {
    (void)even_fail(EVEN_ERR_ARGUMENT, "%s.size is %zu, this library's is %zu", name, size, bytes);
    return even_error_fix("set it to sizeof(%s)", name);
  }
  if (size > bytes && !is_zero((const unsigned char *)given + bytes, size - bytes)) {
    char which[96];
    (void)snprintf(which, sizeof which, "those of its %zu bytes that are behind the first %zu", size, bytes);
    return asks_for_more(name, which);
  }
  memset(own, 0, bytes);
  memcpy(own, given, size < bytes ? size : bytes);
  memcpy(own, &bytes, sizeof bytes);
  return EVEN_OK;
}
