/* A checkpoint that comes from elsewhere, file by file, in any order: whole under its name at the end, or not there. */
#ifndef EVEN_CHECKPOINT_INCOMING_H
#define EVEN_CHECKPOINT_INCOMING_H

#include "checkpoint/reader.h"

typedef struct even_checkpoint_incoming even_checkpoint_incoming;

/* Begins one that shall lie in `folder` (its parents are made), as its manifest, the file as it is, tells. `replace`:
 * another checkpoint of that name gives way to it at the end; else that is EVEN_ERR_IN_USE. Errors: EVEN_ERR_CORRUPT
 * (the manifest), EVEN_ERR_UNSUPPORTED (a newer format, or more files than are taken), those of the file system. */
even_status even_checkpoint_incoming_open(const char *folder, bool replace, const char *manifest, size_t bytes,
                                          even_checkpoint_incoming **out) EVEN_MUST_USE;
/* What the manifest tells. */
const even_checkpoint_info *even_checkpoint_incoming_info(const even_checkpoint_incoming *incoming);
/* The file of that number among info's, new and empty, open for writing: the caller's until it is given back. */
even_status even_checkpoint_incoming_create(even_checkpoint_incoming *incoming, size_t file, int *fd) EVEN_MUST_USE;
/* Links the file of that number to the one at `from` where it can: whoever calls knows that it is the same. */
even_status even_checkpoint_incoming_link(even_checkpoint_incoming *incoming, size_t file, const char *from,
                                          bool *linked) EVEN_MUST_USE;
/* All of the file was written to `fd`, which is not the caller's any more. */
void even_checkpoint_incoming_filled(even_checkpoint_incoming *incoming, size_t file, int fd);
/* Whether all files are here. */
bool even_checkpoint_incoming_is_full(const even_checkpoint_incoming *incoming);
/* Compares every checksum, syncs, and gives the folder its name. Frees `incoming`, also on failure, after which nothing
 * is left. Any one thread. Errors: EVEN_ERR_CORRUPT, EVEN_ERR_STATE (files are missing), EVEN_ERR_IN_USE (without
 * `replace`), EVEN_ERR_INTERRUPTED (the thread's question), those of the file system. */
even_status even_checkpoint_incoming_commit(even_checkpoint_incoming *incoming) EVEN_MUST_USE;
/* Gives it up; nothing is left. NULL is allowed. */
void even_checkpoint_incoming_abandon(even_checkpoint_incoming *incoming);

#endif
