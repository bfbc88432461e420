/* One question a thread. */
#include "base/stop.h"

#include <stddef.h>

static _Thread_local bool (*question)(void);

void even_stop_when(bool (*asked)(void)) {
  question = asked;
}

bool even_stop_asked(void) {
  return question != NULL && question();
}
