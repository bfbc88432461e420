/* The end of the process. */
#ifndef EVEN_OS_EXIT_H
#define EVEN_OS_EXIT_H

#include <evenstep/status.h>

/* Has `call` called when the process ends by exit(); the last one given is called first. Not in a forked child that
 * ends by _exit(); in one that ends by exit() it is called, too. */
even_status even_at_exit(void (*call)(void)) EVEN_MUST_USE;

#endif
