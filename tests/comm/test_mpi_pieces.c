/* What one call of MPI moves: its counts are ints, and transfers may be larger. */
#include "comm/mpi/requests.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void large_transfers_are_cut_into_pieces_that_mpi_can_count(void **state) {
  static const size_t sizes[] = {0,
                                 1,
                                 8192,
                                 ((size_t)1 << 30) - 1,
                                 (size_t)1 << 30,
                                 ((size_t)1 << 30) + 1,
                                 ((size_t)1 << 31) - 1,
                                 (size_t)1 << 31,
                                 ((size_t)1 << 32) + 7,
                                 5 * ((size_t)1 << 30) + 3};
  even_mpi_requests requests = {0};
  (void)state;
  assert_int_equal(even_mpi_requests_reserve(&requests, 1), EVEN_OK);
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    even_mpi_request *request = even_mpi_requests_take(&requests, sizes[i]);
    uint64_t reached = 0;
    assert_non_null(request);
    for (size_t piece = 0; piece < request->count; piece++) {
      size_t begin = 0;
      int bytes = even_mpi_piece(sizes[i], piece, &begin);
      assert_true(begin == reached && (bytes > 0 || sizes[i] == 0));
      reached += (uint64_t)bytes;
    }
    assert_true(reached == sizes[i]);
    even_mpi_requests_give_back(&requests, request);
  }
  even_mpi_requests_free(&requests);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(large_transfers_are_cut_into_pieces_that_mpi_can_count),
  };
  return cmocka_run_group_tests_name("pieces of transfers over MPI", tests, NULL, NULL);
}
