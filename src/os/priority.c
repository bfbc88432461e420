/* The weight of a thread. */
#include "os/priority.h"

#include "os/calls.h"

enum { USUAL = 0, RAISED = -10 };

bool even_priority_raise(void) {
  int nice_value = USUAL;
  if (even_os.getpriority(&nice_value) != 0 || nice_value != USUAL || even_os.reset_on_fork() != 0) {
    return false;
  }
  return even_os.setpriority(RAISED) == 0;
}

void even_priority_lower(void) {
  (void)even_os.setpriority(USUAL); /* lower is always permitted */
}
