/* Whether ranks can be held to a part of a core here. */
#ifndef EVEN_CLI_QUOTA_H
#define EVEN_CLI_QUOTA_H

#include <stdbool.h>

/* Tries it the way `evenstep run --cpu-quota` does, for looking does not tell; all is then as before. *version: of the
 * control groups with the cpu controller, 0: there are none. */
bool even_cli_may_limit_cpu(int *version);

#endif
