/* A scratch folder, and a small checkpoint in it. */
#ifndef EVEN_TESTS_CHECKPOINT_SCRATCH_H
#define EVEN_TESTS_CHECKPOINT_SCRATCH_H

#include <evenstep/checkpoint.h>
#include <stdbool.h>
#include <sys/types.h>

extern char scratch[64]; /* the folder; empty before each test */

int scratch_make(void **state);   /* cmocka set-up of a test */
int scratch_remove(void **state); /* and its tear-down; makes all calls real again */

/* Removes a folder and all below it; 0, or -1 with errno. */
int scratch_remove_tree(const char *path);

/* "SCRATCH/name"; valid until the eighth call from then. */
const char *scratch_path(const char *name);
bool scratch_has(const char *name);
/* Files and folders right below the scratch folder. */
int scratch_entries(void);

off_t scratch_size(const char *name);
/* Alters one bit of a file. */
void scratch_flip(const char *name, off_t offset, unsigned bit);

/* From now on the file system says that it is NFS, and swaps no folders; until the next fault_reset or fault_os. */
void scratch_is_nfs(void);

/* Three tensors of several types; `seed` varies their data. Fills `tensors` (3). */
void sample_tensors(even_checkpoint_tensor *tensors, int seed);
even_status save_sample(const char *folder, bool replace, int seed) EVEN_MUST_USE;
/* The same, with other data in each of its two files. */
even_status save_two(const char *folder, int model, int optimizer) EVEN_MUST_USE;

#endif
