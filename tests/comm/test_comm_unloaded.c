/* The shared library after dlclose: threads that called into it end, and its own threads go on. */
#include <dlfcn.h>
#include <evenstep/comm.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct user {
  void *library;
  sem_t used;
  sem_t closed;
  even_status status;
} user;

static void *call_of(const user *of, const char *name) {
  void *call = dlsym(of->library, name);
  assert_non_null(call);
  return call;
}

/* The casts of POSIX's own example. */
#define CALL_OF(of, call) (*(__typeof__(&(call)) *)&(void *){call_of((of), #call)})

static void *use(void *context) {
  user *of = context;
  const even_comm_params params = {.size = sizeof params, .ranks = 1};
  even_comm *comm = NULL;
  int fd = -1;
  of->status = CALL_OF(of, even_comm_create_segment)(&params, &fd);
  if (of->status == EVEN_OK) {
    of->status = CALL_OF(of, even_comm_open)(&params, fd, &comm);
  }
  if (of->status == EVEN_OK) {
    of->status = CALL_OF(of, even_comm_barrier)(comm);
    CALL_OF(of, even_comm_close)(comm);
  }
  (void)close(fd);
  (void)sem_post(&of->used);
  (void)sem_wait(&of->closed);
  return NULL; /* what the library does at the end of a thread that has called it is done now */
}

static void a_thread_ends_after_the_library_is_closed(void **state) {
  user of = {.library = dlopen(EVENSTEP_LIBRARY, RTLD_NOW | RTLD_LOCAL)};
  pthread_t thread;
  (void)state;
  assert_non_null(of.library);
  assert_int_equal(sem_init(&of.used, 0, 0), 0);
  assert_int_equal(sem_init(&of.closed, 0, 0), 0);
  assert_int_equal(pthread_create(&thread, NULL, use, &of), 0);
  assert_int_equal(sem_wait(&of.used), 0);
  assert_int_equal(of.status, EVEN_OK);
  assert_int_equal(dlclose(of.library), 0);
  assert_int_equal(sem_post(&of.closed), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(a_thread_ends_after_the_library_is_closed)};
  return cmocka_run_group_tests_name("comm_unloaded", tests, NULL, NULL);
}
