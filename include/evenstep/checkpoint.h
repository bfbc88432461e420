/* Durable training state: safetensors files and one manifest in a folder that is either whole or not there.
 *
 * A checkpoint is written to "NAME.partial", each file fsynced, then a manifest with checksums, then the folder is
 * renamed to NAME and its parent fsynced. On any failure the partial folder is removed and earlier checkpoints are
 * untouched. Format of the tensor files: safetensors (Hugging Face, format version 0.3+): 8-byte little-endian header
 * length, JSON header, data. */
#ifndef EVENSTEP_CHECKPOINT_H
#define EVENSTEP_CHECKPOINT_H

#include <evenstep/status.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EVEN_CHECKPOINT_CHUNK_BYTES (4u << 20) /* a checksum covers so much */

typedef struct even_checkpoint_writer even_checkpoint_writer;

typedef struct even_checkpoint_tensor {
  const char *name;  /* UTF-8, unique in its file */
  const char *dtype; /* safetensors names: "F32", "F64", "F16", "BF16", "I64", "U8", "BOOL" … */
  const int64_t *shape;
  size_t dimensions;
  const void *data; /* contiguous, little-endian */
  size_t bytes;
} even_checkpoint_tensor;

/* Begins checkpoint `folder` (its parent must exist; `folder` itself must not). */
EVEN_PUBLIC even_status even_checkpoint_writer_open(const char *folder, even_checkpoint_writer **out) EVEN_MUST_USE;
/* Writes one safetensors file, e.g. "model.safetensors", with its checksums (XXH3, 64 bits, one a chunk). */
EVEN_PUBLIC even_status even_checkpoint_writer_add(even_checkpoint_writer *writer, const char *file_name,
                                                   const even_checkpoint_tensor *tensors, size_t count) EVEN_MUST_USE;
/* Writes manifest.json, syncs and renames. `state_json` is a JSON object (step, cursor, RNG, config …) put under
 * "state". Frees the writer, also on failure. */
EVEN_PUBLIC even_status even_checkpoint_writer_commit(even_checkpoint_writer *writer,
                                                      const char *state_json) EVEN_MUST_USE;
/* Gives up and removes the partial folder. NULL is allowed. */
EVEN_PUBLIC void even_checkpoint_writer_abandon(even_checkpoint_writer *writer);

/* Checksums of a file, one for each chunk, into *sums (free with even_checkpoint_free). */
EVEN_PUBLIC even_status even_checkpoint_file_checksums(const char *path, size_t chunk_bytes, uint64_t **sums,
                                                       size_t *count, uint64_t *file_bytes) EVEN_MUST_USE;
EVEN_PUBLIC void even_checkpoint_free(void *pointer);

#ifdef __cplusplus
}
#endif
#endif
