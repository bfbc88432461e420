/* The version of the library. */
#include <evenstep/version.h>

#if defined(__has_include)
#if __has_include("evenstep_commit.h") /* cmake/commit.cmake writes it; not there for who reads single files */
#include "evenstep_commit.h"
#endif
#endif
#ifndef EVEN_COMMIT
#define EVEN_COMMIT ""
#endif

const char *even_version(void) {
  return EVEN_VERSION;
}

const char *even_commit(void) {
  return EVEN_COMMIT;
}
