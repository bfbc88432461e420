/* The version of the library. */
#include <evenstep/version.h>

#include "evenstep_commit.h"

const char *even_version(void) {
  return EVEN_VERSION;
}

const char *even_commit(void) {
  return EVEN_COMMIT;
}
