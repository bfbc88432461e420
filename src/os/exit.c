/* The end of the process. */
#include "os/exit.h"

#include "base/fail.h"
#include "os/calls.h"

even_status even_at_exit(void (*call)(void)) {
  return even_os.at_exit(call) == 0 ? EVEN_OK : even_fail(EVEN_ERR_MEMORY, "no memory for a call at the process's end");
}
