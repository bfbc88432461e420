/* Whether ranks can be held to a part of a core here. */
#include "cli/quota.h"

#include "base/fail.h"
#include "os/cgroup.h"
#include "os/clock.h"

#include <inttypes.h>
#include <stdio.h>

bool even_cli_may_limit_cpu(int *version) {
  even_cgroup own;
  even_cgroup made;
  char name[64];
  bool can = false;
  *version = 0;
  if (even_cgroup_own("", "cpu", &own) == EVEN_OK) {
    *version = own.version;
    (void)snprintf(name, sizeof name, "evenstep-try-%" PRIu64, even_clock_ns());
    if (even_cgroup_make(&own, "cpu", name, &made) == EVEN_OK) {
      can = even_cgroup_limit_cpu(&made, 0.5) == EVEN_OK;
      can = even_cgroup_remove(made.folder) == EVEN_OK && can;
      even_cgroup_switch_off(&made, "cpu");
    }
  }
  even_error_clear();
  return can;
}
