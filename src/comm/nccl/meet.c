/* How the ranks of a communicator come to know one another: where each one's board is, over the caller's gathering. */
#include "comm/nccl/device_comm.h"

#include "base/alloc.h"
#include "base/params.h"

#include <string.h>

static even_status keep_numbers(even_device_comm *comm, const int *numbers) {
  size_t ranks = (size_t)comm->ranks;
  if (numbers != NULL && comm->numbers == NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&comm->numbers, ranks));
    memcpy(comm->numbers, numbers, ranks * sizeof *numbers);
  }
  return EVEN_OK;
}

/* Without a board a rank comes all the same: the others find nobody there, and know nothing of it. */
static void make_board(even_device_comm *comm, even_board_place *place) {
  const even_error kept = *even_error_last();
  if (even_board_create(comm->rank, comm->ranks, &comm->board, place) != EVEN_OK) {
    (void)even_error_restore(&kept);
  }
}

even_status even_device_introduce(even_device_comm *comm, const even_device_comm_params *params) {
  even_board_place own;
  even_board_place *all = NULL;
  EVEN_TRY(keep_numbers(comm, params->numbers));
  if (params->gather == NULL || comm->board.memory.address != NULL) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&all, (size_t)comm->ranks));
  memset(&own, 0, sizeof own); /* all of it crosses */
  make_board(comm, &own);
  const even_error aside = even_error_aside();
  even_status status = even_error_told(params->gather(params->context, &own, sizeof own, all), &aside);
  (void)pthread_mutex_lock(&comm->track);
  if (status == EVEN_OK) {
    even_board_share(&comm->board, all, sizeof *all);
  } else {
    even_board_close(&comm->board);
  }
  if (comm->board.memory.address != NULL) {
    even_board_keep_flight(&comm->board, &comm->flight);
  }
  (void)pthread_mutex_unlock(&comm->track);
  even_free(all);
  return status;
}

even_status even_device_comm_meet(even_device_comm *comm, const even_device_comm_params *params) {
  even_device_comm_params own;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_device_comm_params, &own, params));
  EVEN_TRY(EVEN_CHECK_RESERVED(even_device_comm_params, &own));
  params = &own;
  if (params->gather == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "meet: no gather in even_device_comm_params");
  }
  even_device_watch_end(comm); /* nobody looks at the board while it is put there */
  even_status status = even_device_introduce(comm, params);
  even_device_watch_begin(comm);
  return status;
}
