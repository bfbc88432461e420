/* The real file system's facts, but for its kind. */
#include "support/nfs.h"

#include "os/calls.h"

int statfs_of_nfs(int fd, struct statfs *out) {
  int failed = even_os_real.fstatfs(fd, out);
  out->f_type = 0x6969;
  return failed;
}
