/* Copies of blocks of memory, cut into pieces that several threads take. */
#include "checkpoint/items.h"
#include "checkpoint/stream_copy.h"

#include <evenstep/checkpoint.h>

/* Much work for one call of a thread, and little enough that all end at about the same time. */
enum { PIECE_BYTES = 1 << 20 };

typedef struct moving_job {
  const even_checkpoint_move *moves;
  size_t count;
} moving_job;

static size_t pieces_of(const even_checkpoint_move *move) {
  return (move->bytes + PIECE_BYTES - 1) / PIECE_BYTES;
}

/* Pieces of all moves follow each other. */
static even_status move_piece(void *context, void *own, size_t item) {
  const moving_job *job = context;
  size_t i = 0;
  (void)own;
  while (item >= pieces_of(&job->moves[i])) {
    item -= pieces_of(&job->moves[i++]);
  }
  const even_checkpoint_move *move = &job->moves[i];
  size_t at = item * PIECE_BYTES;
  size_t bytes = move->bytes - at < PIECE_BYTES ? move->bytes - at : PIECE_BYTES;
  even_stream_copy((char *)move->to + at, (const char *)move->from + at, bytes);
  return EVEN_OK;
}

even_status even_checkpoint_bytes_move(const even_checkpoint_move *moves, size_t count) {
  moving_job job = {.moves = moves, .count = count};
  even_items_job items = {
      .most = EVEN_ITEMS_USUAL_THREADS, .context = &job, .work = move_piece, .what = "a checkpoint was put in place"};
  for (size_t i = 0; i < count; i++) {
    items.count += pieces_of(&moves[i]);
  }
  return even_items_run(&items);
}
