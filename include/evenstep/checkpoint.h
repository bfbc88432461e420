/* Durable training state: safetensors files and one manifest in a folder that is either whole or not there.
 *
 * A checkpoint is written to "NAME.evenstep.partial", each file fsynced, then a manifest with checksums, then the
 * folder is renamed to NAME and its parent fsynced. On any failure the partial folder is removed and earlier
 * checkpoints are untouched. A partial folder whose writer was killed is removed by the next writer beside it (where
 * the writer may live on another host, once nothing in it has changed for ten minutes); that of a living writer is
 * locked and left alone. Format of the tensor files: safetensors (Hugging Face, format version 0.3+): 8-byte
 * little-endian header length, JSON header, data.
 *
 * Threads: one writer belongs to one thread at a time; all else may be called from any. Everything that is passed stays
 * the caller's and must last until the call returns; strings are UTF-8. Pointers must not be NULL unless it says so. */
#ifndef EVENSTEP_CHECKPOINT_H
#define EVENSTEP_CHECKPOINT_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EVEN_CHECKPOINT_FORMAT "evenstep-checkpoint-1"
#define EVEN_CHECKPOINT_MANIFEST "manifest.json"
#define EVEN_CHECKPOINT_PARTIAL ".evenstep.partial" /* an unfinished folder's name; no user has such folders */
#define EVEN_CHECKPOINT_CHUNK_BYTES (4u << 20)      /* a checksum covers so much */

typedef struct even_checkpoint_writer even_checkpoint_writer;

typedef struct even_checkpoint_tensor {
  const char *name;  /* UTF-8, unique in its file */
  const char *dtype; /* safetensors names: "F32", "F64", "F16", "BF16", "I64", "U8", "BOOL" … */
  const int64_t *shape;
  size_t dimensions;
  const void *data; /* contiguous, little-endian; NULL: asked for with `fetch` when it is its turn */
  size_t bytes;
} even_checkpoint_tensor;

typedef struct even_checkpoint_pair {
  const char *key;
  const char *value;
} even_checkpoint_pair;

/* Gives the bytes of tensors[index], which stay valid until the next call or the end of the file: so that state which
 * lies on a device needs one tensor's worth of host memory, not all of it. A failure ends the file with its status. */
typedef even_status (*even_checkpoint_fetch)(void *context, size_t index, const void **data);

typedef struct even_checkpoint_params {
  size_t size;             /* sizeof(even_checkpoint_params) */
  const char *folder;      /* its parent must exist */
  bool replace;            /* an older checkpoint of this name is swapped for the new one in one step; else it is
                              EVEN_ERR_IN_USE. Anything that is not a checkpoint is never replaced */
  uint64_t expected_bytes; /* of all tensors, for the figure in a full disk's error; 0: unknown */
  const char *previous;    /* a checkpoint that was committed before, or NULL: large files that have not changed since
                              (by every checksum) are linked to its own, not written again, where links are possible;
                              of others the chunks that have not are shared, where the file system shares extents */
  /* That of the job, or NULL: where it has a sign there that other hosts see (evenstep.running), and this process has
   * seen it, no checkpoint is put in place once another job's is there instead of that of `job`: EVEN_ERR_IN_USE. */
  const char *run_folder;
  const char *job; /* EVENSTEP_JOB; NULL as above */
  bool sign_seen;  /* another process of the job on this host has seen it there: counts as this one's own look */
} even_checkpoint_params;

typedef struct even_checkpoint_file {
  size_t size;      /* sizeof(even_checkpoint_file) */
  const char *name; /* "model.safetensors": no '/', not the manifest's name */
  const even_checkpoint_tensor *tensors;
  size_t tensor_count;
  const even_checkpoint_pair *metadata; /* for "__metadata__"; NULL: {"format": "pt"} alone; keys once, in UTF-8 */
  size_t metadata_count;
  even_checkpoint_fetch fetch; /* NULL: every tensor has its data */
  void *fetch_context;
  const void *raw; /* not NULL: the file is these bytes, and no safetensors file */
  size_t raw_bytes;
} even_checkpoint_file;

/* What a checkpoint's files have, without its manifest. The rest was written. */
typedef struct even_checkpoint_saved {
  uint64_t bytes;
  uint64_t linked_bytes; /* of files that are further names of those in `previous` */
  uint64_t shared_bytes; /* of chunks that share their place on the disk with those in `previous` */
} even_checkpoint_saved;

/* Begins a checkpoint; *out is the caller's, ended by commit or abandon, and NULL after a failure. Errors:
 * EVEN_ERR_ARGUMENT (name), _NOT_FOUND (parent), _IN_USE (the folder exists, or another process writes it at this
 * moment), those of the file system. */
EVEN_PUBLIC even_status even_checkpoint_writer_open(const even_checkpoint_params *params,
                                                    even_checkpoint_writer **out) EVEN_MUST_USE;
/* Writes one safetensors file with its checksums (XXH3, 64 bits, one a chunk), tensors in descending order of their
 * alignment, then by name; nothing is copied. After a failure the partial folder is gone and the writer refuses
 * everything but commit and abandon. Errors: EVEN_ERR_ARGUMENT (names twice, a shape that does not fit its bytes …),
 * _OVERFLOW (a shape with a negative number, or more than 64 bits count), what `fetch` returned, _NO_SPACE with the
 * figures. */
EVEN_PUBLIC even_status even_checkpoint_writer_add(even_checkpoint_writer *writer,
                                                   const even_checkpoint_file *file) EVEN_MUST_USE;
/* Of the files that were added so far. */
EVEN_PUBLIC void even_checkpoint_writer_saved(const even_checkpoint_writer *writer, even_checkpoint_saved *out);
/* Writes manifest.json, syncs and renames. `state_json` is a JSON object (step, cursor, RNG, config …) put under
 * "state". Frees the writer, also on failure. Only a failure to sync the parent leaves the (whole) checkpoint behind.
 * Errors: EVEN_ERR_ARGUMENT (state_json is NULL or no object in JSON), EVEN_ERR_STATE (an add failed before),
 * EVEN_ERR_OVERFLOW (a manifest of more than 256 MiB: nobody would read it), _NO_SPACE and those of the file system. */
EVEN_PUBLIC even_status even_checkpoint_writer_commit(even_checkpoint_writer *writer,
                                                      const char *state_json) EVEN_MUST_USE;
/* Gives up, removes the partial folder, frees the writer. NULL is allowed. */
EVEN_PUBLIC void even_checkpoint_writer_abandon(even_checkpoint_writer *writer);

/* ---- snapshots: a checkpoint that is copied to memory at once and written later ---- */
typedef struct even_checkpoint_snapshot even_checkpoint_snapshot;

/* Memory for one checkpoint at a time; it grows to what is taken and is kept for the next. fd: an empty memory file
 * that another process holds, so that it can write what this one took and died before it had written it (owned from
 * then on, also after a failure; what is no such file is left alone), -1: memory of our own. */
EVEN_PUBLIC even_status even_checkpoint_snapshot_open(int fd, even_checkpoint_snapshot **out) EVEN_MUST_USE;
/* Copies a whole checkpoint. Nothing of what is passed is needed after the call. Errors: EVEN_ERR_STATE (the last one
 * was not written yet), EVEN_ERR_ARGUMENT as even_checkpoint_writer_add, EVEN_ERR_MEMORY, EVEN_ERR_NO_SPACE; there is
 * nothing to write after a failure. */
EVEN_PUBLIC even_status even_checkpoint_snapshot_take(even_checkpoint_snapshot *snapshot,
                                                      const even_checkpoint_params *params,
                                                      const even_checkpoint_file *files, size_t count,
                                                      const char *state_json) EVEN_MUST_USE;
/* Writes what was taken, as a writer does, with its errors; any one thread. The memory is free for the next, also after
 * a failure. */
EVEN_PUBLIC even_status even_checkpoint_snapshot_write(even_checkpoint_snapshot *snapshot) EVEN_MUST_USE;
/* Of what was written last: zeros where nothing was, or where it failed. */
EVEN_PUBLIC void even_checkpoint_snapshot_saved(const even_checkpoint_snapshot *snapshot, even_checkpoint_saved *out);
/* Nobody may be writing. NULL is allowed. */
EVEN_PUBLIC void even_checkpoint_snapshot_close(even_checkpoint_snapshot *snapshot);

/* Removes a checkpoint so that no moment shows half of it: renamed to a partial name first. EVEN_ERR_INPUT where the
 * folder holds no manifest; else errors of the file system. Any thread. */
EVEN_PUBLIC even_status even_checkpoint_remove(const char *folder) EVEN_MUST_USE;

/* Checksums of a file, one for each chunk, into *sums (free with even_checkpoint_free; NULL after a
 * failure). Errors: EVEN_ERR_NOT_FOUND, EVEN_ERR_INPUT (no regular file), EVEN_ERR_MEMORY, those of reading. */
EVEN_PUBLIC even_status even_checkpoint_file_checksums(const char *path, size_t chunk_bytes, uint64_t **sums,
                                                       size_t *count, uint64_t *file_bytes) EVEN_MUST_USE;
/* Where bytes of a file go. */
typedef struct even_checkpoint_place {
  uint64_t begin; /* in the file */
  size_t bytes;
  void *data;
} even_checkpoint_place;

typedef struct even_checkpoint_reading {
  size_t size;      /* sizeof(even_checkpoint_reading) */
  const char *path; /* of the file */
  uint64_t bytes;   /* that it must have */
  size_t chunk_bytes;
  const uint64_t *sums; /* one a chunk, as the manifest has them */
  size_t sum_count;
  const even_checkpoint_place *places; /* ascending, apart; what lies in none of them is compared all the same */
  size_t place_count;
  bool only_places; /* chunks in which no place lies are neither read nor compared */
} even_checkpoint_reading;

/* Reads a file to its places and compares every checksum, in one pass of several threads. After a failure the places
 * hold anything: nothing of it may be used. Errors: EVEN_ERR_CORRUPT (another size, or the first chunk that is
 * altered), EVEN_ERR_ARGUMENT, EVEN_ERR_NOT_FOUND, EVEN_ERR_INPUT, EVEN_ERR_MEMORY, EVEN_ERR_INTERRUPTED, those of
 * reading. */
EVEN_PUBLIC even_status even_checkpoint_file_read(const even_checkpoint_reading *reading) EVEN_MUST_USE;
/* The same of `count` files, whose chunks the threads share: none waits at a file's end. They are opened some at a
 * time, and the sizes of these are looked at before any of them is read. The damage that is told is the first file of
 * another size, or, where all have theirs, the first altered chunk in the first file that has any. */
EVEN_PUBLIC even_status even_checkpoint_files_read(const even_checkpoint_reading *readings, size_t count) EVEN_MUST_USE;
/* Whether all of a file lies in memory already (the page cache, a file system of memory), or nobody can say. Errors:
 * EVEN_ERR_NOT_FOUND, EVEN_ERR_INPUT, those of opening it. */
EVEN_PUBLIC even_status even_checkpoint_file_is_cached(const char *path, bool *cached) EVEN_MUST_USE;
typedef struct even_checkpoint_move {
  const void *from;
  void *to;
  size_t bytes;
} even_checkpoint_move;

/* Copies blocks that do not overlap, by several threads. Any thread. Errors: EVEN_ERR_INTERRUPTED. */
EVEN_PUBLIC even_status even_checkpoint_bytes_move(const even_checkpoint_move *moves, size_t count) EVEN_MUST_USE;
/* XXH3, 64 bits, of a block of memory: what covers the manifest itself. */
EVEN_PUBLIC uint64_t even_checkpoint_checksum(const void *data, size_t bytes);
/* CRC-32C (RFC 3720, appendix B.4), by which TensorFlow's files are checked. */
EVEN_PUBLIC uint32_t even_checkpoint_crc32c(const void *data, size_t bytes);
/* NULL is allowed. */
EVEN_PUBLIC void even_checkpoint_free(void *pointer);

#ifdef __cplusplus
}
#endif
#endif
