/* Which Python interpreter the program uses. */
#ifndef EVEN_CLI_PYTHON_H
#define EVEN_CLI_PYTHON_H

#include "base/text.h"

/* The interpreter that the user wishes (--python; NULL: none), else the one of `python -m evenstep`, which says so in
 * EVENSTEP_MAIN_PYTHON (python/evenstep/__main__.py), else the one of this program's installation, else
 * $EVENSTEP_PYTHON, else python3 on PATH; into `out` (replaced). Errors: EVEN_ERR_NOT_FOUND (the wish). */
even_status even_cli_python(const char *wish, even_text *out) EVEN_MUST_USE;

#endif
