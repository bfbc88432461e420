/* getrandom(2). */
#include "os/random.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>

even_status even_random_hex(char *out, size_t digits) {
  unsigned char bytes[32];
  size_t need = (digits + 1) / 2;
  if (need > sizeof bytes) {
    return even_fail(EVEN_ERR_ARGUMENT, "%zu random digits", digits);
  }
  if (even_os.getrandom(bytes, need, 0) != (ssize_t)need) {
    return even_fail_errno(errno, "no random bytes could be had");
  }
  for (size_t i = 0; i < digits; i++) {
    out[i] = "0123456789abcdef"[i % 2 == 0 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15];
  }
  out[digits] = '\0';
  return EVEN_OK;
}
