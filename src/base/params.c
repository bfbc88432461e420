/* Parameter structs that grow. */
#include "base/params.h"

#include "base/fail.h"

#include <evenstep/version.h>
#include <stdbool.h>
#include <string.h>

/* No struct of ours comes near it: a larger number is none that sizeof gave. */
#define MOST_BYTES ((size_t)4096)

static bool is_zero(const unsigned char *bytes, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (bytes[i] != 0) {
      return false;
    }
  }
  return true;
}

even_status even_params_take(const char *name, void *own, size_t bytes, size_t least, const void *given) {
  size_t size = 0;
  if (given == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "no %s are given", name);
  }
  memcpy(&size, given, sizeof size);
  if (size < least || size > MOST_BYTES) {
    (void)even_fail(EVEN_ERR_ARGUMENT, "%s.size is %zu, this library's is %zu", name, size, bytes);
    return even_error_fix("set it to sizeof(%s)", name);
  }
  if (size > bytes && !is_zero((const unsigned char *)given + bytes, size - bytes)) {
    (void)even_fail(EVEN_ERR_ARGUMENT,
                    "%s has %zu bytes, and asks in those behind the first %zu for what this library, version %s, does "
                    "not have yet",
                    name, size, bytes, even_version());
    return even_error_fix(
        "install the library that belongs to the headers of this program, or leave the new members 0");
  }
  memset(own, 0, bytes);
  memcpy(own, given, size < bytes ? size : bytes);
  memcpy(own, &bytes, sizeof bytes);
  return EVEN_OK;
}
