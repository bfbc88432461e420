/* The subcommands of `evenstep ckpt` that have files of their own. */
#ifndef EVEN_CLI_CKPT_H
#define EVEN_CLI_CKPT_H

#include "base/json_writer.h"
#include "base/text.h"
#include "os/folder.h"

#include <jansson.h>

/* As even_command's `run`. */
int even_cli_ckpt_repair(int argc, char **argv);
int even_cli_ckpt_diff(int argc, char **argv);
int even_cli_ckpt_convert(int argc, char **argv);
int even_cli_ckpt_export(int argc, char **argv);
int even_cli_ckpt_reshard(int argc, char **argv);
int even_cli_ckpt_push(int argc, char **argv);
int even_cli_ckpt_fetch(int argc, char **argv);

/* ckpt_named.c. The folder that a word names: itself, or, where nothing has that name and it is no path, that of the
 * run in runs/; *out is replaced. EVEN_ERR_NOT_FOUND: there is neither. */
even_status even_ckpt_folder(const char *name, even_text *out) EVEN_MUST_USE;
/* Adds the checkpoints that lie in `folder`, or in the checkpoints/ of a run folder, or `folder` itself; with `growing`
 * those, too, that are being written; without, folders with the name of a step's checkpoint that have lost their
 * manifest. */
even_status even_ckpt_paths(const char *folder, bool growing, even_names *out) EVEN_MUST_USE;

/* Told of one checkpoint; `problems` and the last error are as behind even_checkpoint_verify. */
typedef void even_ckpt_verified(void *context, const char *path, even_status status, const even_names *problems);
/* ckpt_verified.c. Reads every byte of the checkpoints that a word names and tells of each. One that its job replaces
 * meanwhile is read again, one that it removes is left out. Tells at least once: of the word where it names none. */
void even_ckpt_verify(const char *name, even_ckpt_verified *told, void *context);

/* Told of each value that is not the same on both sides: where it is ("groups.0.lr"), and both; NULL: not there. */
typedef void even_json_difference(void *context, const char *where, const json_t *a, const json_t *b);
/* Walks over two JSON values, members and elements one by one, and tells what differs. `prefix` begins each place. */
even_status even_json_compare(const char *prefix, const json_t *a, const json_t *b, even_json_difference *told,
                              void *context) EVEN_MUST_USE;

#endif
