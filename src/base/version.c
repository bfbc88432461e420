/* The version of the library. */
#include <evenstep/version.h>

const char *even_version(void) {
  return EVEN_VERSION;
}
