/* Which run a command means: a folder, or a name in runs/. */
#ifndef EVEN_CLI_RUN_FOLDER_H
#define EVEN_CLI_RUN_FOLDER_H

#include "base/text.h"

/* `name` NULL: the run of runs/ that lives, or else the one begun last. *out is replaced. EVEN_ERR_NOT_FOUND with the
 * runs that there are. */
even_status even_run_folder(const char *name, even_text *out) EVEN_MUST_USE;

/* The same for one that may be without history (--no-monitor), where it is named. */
even_status even_run_folder_at_all(const char *name, even_text *out) EVEN_MUST_USE;

#endif
