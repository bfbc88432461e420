/* prlimit(2) on a process that is not this one. */
#include "os/memory_limit.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

enum { LONGEST_STATM = 4096 };

/* What it has mapped: the first number of /proc/PID/statm, in pages. */
static even_status mapped_bytes(pid_t pid, uint64_t *out) {
  char path[64];
  even_text text = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "/proc/%ld/statm", (long)pid);
  even_status status = even_file_read(path, LONGEST_STATM, &text);
  if (status == EVEN_OK) {
    *out = strtoull(even_text_string(&text), NULL, 10) * (uint64_t)even_os.sysconf(_SC_PAGESIZE);
  }
  even_text_free(&text);
  return status;
}

even_status even_memory_limit_set(pid_t pid, uint64_t room_bytes, uint64_t *before) {
  struct rlimit limit;
  uint64_t mapped = 0;
  EVEN_TRY(mapped_bytes(pid, &mapped));
  if (even_os.prlimit(pid, RLIMIT_AS, NULL, &limit) != 0) {
    return even_fail_errno(errno, "the limits of process %ld cannot be read", (long)pid);
  }
  *before = limit.rlim_cur;
  limit.rlim_cur = mapped + room_bytes < limit.rlim_max ? mapped + room_bytes : limit.rlim_max;
  return even_os.prlimit(pid, RLIMIT_AS, &limit, NULL) != 0
             ? even_fail_errno(errno, "the limits of process %ld cannot be set", (long)pid)
             : EVEN_OK;
}

even_status even_memory_limit_restore(pid_t pid, uint64_t before) {
  struct rlimit limit;
  if (even_os.prlimit(pid, RLIMIT_AS, NULL, &limit) == 0) {
    limit.rlim_cur = before;
    if (even_os.prlimit(pid, RLIMIT_AS, &limit, NULL) == 0) {
      return EVEN_OK;
    }
  }
  return errno == ESRCH ? EVEN_OK : even_fail_errno(errno, "the limits of process %ld cannot be set", (long)pid);
}
