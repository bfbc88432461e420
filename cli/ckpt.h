/* The subcommands of `evenstep ckpt` that have files of their own. */
#ifndef EVEN_CLI_CKPT_H
#define EVEN_CLI_CKPT_H

#include "base/json_writer.h"

#include <jansson.h>

/* As even_command's `run`. */
int even_cli_ckpt_repair(int argc, char **argv);
int even_cli_ckpt_diff(int argc, char **argv);
int even_cli_ckpt_convert(int argc, char **argv);
int even_cli_ckpt_export(int argc, char **argv);
int even_cli_ckpt_reshard(int argc, char **argv);
int even_cli_ckpt_push(int argc, char **argv);
int even_cli_ckpt_fetch(int argc, char **argv);

/* Told of each value that is not the same on both sides: where it is ("groups.0.lr"), and both; NULL: not there. */
typedef void even_json_difference(void *context, const char *where, const json_t *a, const json_t *b);
/* Walks over two JSON values, members and elements one by one, and tells what differs. `prefix` begins each place. */
even_status even_json_compare(const char *prefix, const json_t *a, const json_t *b, even_json_difference *told,
                              void *context) EVEN_MUST_USE;

#endif
