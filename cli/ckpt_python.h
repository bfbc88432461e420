/* What subcommands of `evenstep ckpt` have Python do, where torch and fsspec are: a module that prints what came of it
 * as one line of JSON, {"text", "report"} or {"what", "fix", "code"}. */
#ifndef EVEN_CLI_CKPT_PYTHON_H
#define EVEN_CLI_CKPT_PYTHON_H

#include <evenstep/status.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

enum { EVEN_CKPT_PYTHON_MOST_WORDS = 24 };

/* Runs `python -m MODULE WORDS…` (python NULL: the one that is found), prints its text, or as JSON its report. Returns
 * the exit code, its error told. */
int even_ckpt_python(const char *python, const char *module, const char *const *words, size_t count, bool as_json);

/* Does `ckpt argv[0] …`, of whose words some are URLs, by evenstep.checkpoint_elsewhere, which takes this process's
 * place and runs this program on what it has brought here. Returns (the exit code, its error told) only where it
 * cannot. */
int even_ckpt_elsewhere(int argc, char **argv);

/* The error that an answer of such a module tells. */
even_status even_ckpt_python_error(const char *module, const json_t *answer) EVEN_MUST_USE;

#endif
