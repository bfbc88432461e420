/* Reads checkpoints back: what a manifest says, whether the files are what it says, which is the
 * newest whole one. Program side only. Every function may be called from any thread. */
#ifndef EVEN_CHECKPOINT_READER_H
#define EVEN_CHECKPOINT_READER_H

#include "base/text.h"
#include "checkpoint/parts.h"
#include "os/folder.h"

#include <evenstep/status.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct even_checkpoint_stored_file {
  char *name;
  uint64_t bytes;
  uint64_t chunk_bytes;
  uint64_t *sums; /* one a chunk: ceil(bytes / chunk_bytes) */
  size_t sum_count;
  even_part *parts; /* of what shares a chunk with others, ascending; NULL where the manifest has none */
  size_t part_count;
} even_checkpoint_stored_file;

typedef struct even_checkpoint_info {
  char *created; /* UTC, ISO 8601 with microseconds */
  /* Of two checkpoints the newer has the greater text: by turn, generation and number of its state's "order" (zeros
   * where it has none: it is of before these, or of another writer), then by `created`. */
  char *order;
  int64_t turn; /* of "order" */
  even_checkpoint_stored_file *files;
  size_t file_count;
  uint64_t bytes;     /* of all files */
  int64_t step;       /* -1: the state does not say */
  int64_t epoch;      /* -1 */
  int64_t world_size; /* -1 */
  json_t *state;      /* the whole state */
} even_checkpoint_info;

/* Parses a manifest; `origin` is put into errors. EVEN_ERR_CORRUPT: its own checksum, its form or a number in it is
 * wrong. Free with even_checkpoint_info_free, also after a failure. */
even_status even_manifest_parse(const char *origin, const char *text, size_t bytes,
                                even_checkpoint_info *out) EVEN_MUST_USE;
/* The same for that of a checkpoint's folder; its bytes are appended to `text`. EVEN_ERR_CORRUPT, too, where it is a
 * symbolic link; other errors are those of reading. */
even_status even_manifest_read(const char *folder, even_text *text, even_checkpoint_info *out) EVEN_MUST_USE;
void even_checkpoint_info_free(even_checkpoint_info *info);

/* Reads the manifest of a checkpoint and compares the sizes of its files; no tensor is read. Errors:
 * EVEN_ERR_NOT_FOUND (no such folder), _INPUT (no checkpoint), _CORRUPT; *out holds what was read. Free with
 * even_checkpoint_info_free, also after a failure. */
even_status even_checkpoint_inspect(const char *folder, even_checkpoint_info *out) EVEN_MUST_USE;

/* Reads everything and compares every checksum. EVEN_ERR_CORRUPT where anything differs: *problems has a line for each
 * damage (the first is the error's text). `problems` may be NULL; free with even_names_free, also after a failure.
 * EVEN_ERR_INTERRUPTED where the thread's question says so (base/stop.h); this holds for what searches, too. */
even_status even_checkpoint_verify(const char *folder, even_names *problems) EVEN_MUST_USE;

/* Puts right what is damaged in `folder` by a copy of the same checkpoint: chunks, the manifest, missing files. Of a
 * manifest of which too little is left to tell whose it was, the files tell: that of the copy is taken where by it
 * a file of each optimizer, or all of all models, are whole, and the others that are there are the copy's but for a
 * tenth of their tensors' bytes, and in a chunk of several. A file is written anew beside the old one and then takes
 * its place, so that nothing is worse when this ends early. `repaired` has a line for each chunk and file, `left` for
 * each chunk that is damaged in both (EVEN_ERR_CORRUPT then; such a file stays as it is). EVEN_ERR_INPUT: `copy` is
 * another checkpoint. Free both with even_names_free, also after a failure.
 */
even_status even_checkpoint_repair(const char *folder, const char *copy, even_names *repaired,
                                   even_names *left) EVEN_MUST_USE;

/* The newest whole checkpoint in `folder`, by `order`; damaged, unreadable and unfinished ones are
 * passed over.
 * thorough: every checksum is compared, else sizes only. *path is NULL where there is none or no such folder. Free
 * *path with even_free. */
even_status even_checkpoint_find_newest(const char *folder, bool thorough, char **path) EVEN_MUST_USE;
/* Whether a checkpoint may be taken, by its manifest alone. */
typedef bool (*even_checkpoint_accept)(const void *context, const even_checkpoint_info *info);
/* The same, not thorough, among those that `accept` takes. */
even_status even_checkpoint_find_newest_of(const char *folder, even_checkpoint_accept accept, const void *context,
                                           char **path) EVEN_MUST_USE;
/* The same, thorough, among those that `accept` takes (NULL: all), and what was passed over: `damaged` has a line for
 * each checkpoint that the search met and that is damaged or cannot be read (no permission, a failing disk, a newer
 * format), worded as the error of even_checkpoint_verify (of those older than *path, only the manifest is read and the
 * sizes are compared). Whose a manifest is that cannot be read, nobody can tell: it has its line, too. Free with
 * even_names_free, also after a failure. */
even_status even_checkpoint_find_whole(const char *folder, even_checkpoint_accept accept, const void *context,
                                       even_names *damaged, char **path) EVEN_MUST_USE;
/* The same among those of several folders. */
even_status even_checkpoint_find_whole_of(const char *const *folders, size_t count, even_checkpoint_accept accept,
                                          const void *context, even_names *damaged, char **path) EVEN_MUST_USE;

/* Checks the header of a safetensors file (the bytes behind the 8 of its length) against the bytes of data that follow
 * it: types known, shapes fitting, ranges in order without overlap or gap. *out is the header (json_decref).
 * EVEN_ERR_CORRUPT. */
even_status even_safetensors_parse(const char *origin, const char *header, size_t header_bytes, uint64_t data_bytes,
                                   json_t **out) EVEN_MUST_USE;
/* The same for a file. */
even_status even_safetensors_read_header(const char *path, json_t **out) EVEN_MUST_USE;

#endif
