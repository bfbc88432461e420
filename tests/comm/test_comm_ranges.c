/* NVTX ranges around collectives, against a made-up NVTX that checks that each push has its pop. */
#include "comm/ranks.h"
#include "os/calls.h"
#include "os/fake_nvtx.h"
#include "os/ranges.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static int restore(void **state) {
  (void)state;
  even_ranges_close();
  even_os = even_os_real;
  fake_nvtx_reset();
  return 0;
}

static void make_calls(even_comm *comm) {
  float data[2] = {1, 2};
  const size_t counts[1] = {2};
  assert_int_equal(even_comm_all_reduce(comm, data, 2, EVEN_F32, EVEN_SUM), EVEN_OK);
  assert_int_equal(even_comm_all_reduce(comm, NULL, 2, EVEN_F32, EVEN_SUM), EVEN_ERR_ARGUMENT); /* no call */
  assert_int_equal(even_comm_all_gather(comm, data, data, counts, EVEN_F32), EVEN_OK);
  assert_int_equal(even_comm_barrier(comm), EVEN_OK);
}

static void nothing_is_called_unless_asked(void **state) {
  even_comm *comm = ranks_open_alone(0);
  (void)state;
  assert_non_null(comm);
  make_calls(comm);
  assert_false(even_ranges_on());
  assert_int_equal(fake_nvtx_calls(), 0);
  even_comm_close(comm);
}

static void each_collective_is_a_range(void **state) {
  static const char *const expected[] = {"+all_reduce 8 bytes", "-", "+all_gather 8 bytes", "-",
                                         "+barrier 0 bytes",    "-"};
  even_comm *comm = ranks_open_alone(0);
  (void)state;
  assert_non_null(comm);
  assert_int_equal(even_ranges_open(FAKE_NVTX), EVEN_OK);
  assert_int_equal(even_ranges_open("once is enough"), EVEN_OK);
  make_calls(comm);
  assert_int_equal(fake_nvtx_calls(), sizeof expected / sizeof expected[0]);
  for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
    assert_string_equal(fake_nvtx_call(i), expected[i]);
  }
  assert_null(fake_nvtx_violation());
  even_comm_leave(comm);
  assert_int_equal(even_comm_barrier(comm), EVEN_ERR_STATE); /* one that fails is closed, too */
  assert_int_equal(fake_nvtx_calls(), 8);
  assert_null(fake_nvtx_violation());
  even_comm_close(comm);
}

static void *close_there(void *range) {
  even_range_end(*(uint64_t *)range);
  return NULL;
}

static void phases_end_anywhere(void **state) {
  pthread_t thread;
  (void)state;
  assert_int_equal(even_ranges_open(FAKE_NVTX), EVEN_OK);
  uint64_t data = even_range_start("data");
  even_range_push("the script's own");
  uint64_t forward = even_range_start("forward");
  assert_int_equal(pthread_create(&thread, NULL, close_there, &data), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  even_range_pop();
  assert_string_equal(fake_nvtx_violation(), "a range is still open");
  even_range_end(forward);
  assert_null(fake_nvtx_violation());
}

static void *no_symbol(void *handle, const char *name) {
  (void)handle;
  return strcmp(name, "nvtxRangeEnd") == 0 ? NULL : even_os_real.dlsym(handle, name);
}

static void *no_library(const char *name, int flags) {
  (void)name, (void)flags;
  return NULL;
}

static void a_library_that_is_missing_or_lacks_functions_is_reported(void **state) {
  (void)state;
  assert_int_equal(even_ranges_open("/nowhere/libnvtx.so"), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->fix, "EVENSTEP_NVTX_LIBRARY"));
  even_os.dlopen = no_library;
  assert_int_equal(even_ranges_open(NULL), EVEN_ERR_NOT_FOUND);
  assert_non_null(strstr(even_error_last()->what, "libnvToolsExt.so.1"));
  even_os = even_os_real;
  even_os.dlsym = no_symbol;
  assert_int_equal(even_ranges_open(FAKE_NVTX), EVEN_ERR_NOT_FOUND);
  assert_false(even_ranges_on());
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_teardown(nothing_is_called_unless_asked, restore),
      cmocka_unit_test_teardown(each_collective_is_a_range, restore),
      cmocka_unit_test_teardown(phases_end_anywhere, restore),
      cmocka_unit_test_teardown(a_library_that_is_missing_or_lacks_functions_is_reported, restore),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
