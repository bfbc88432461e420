/* The server over real sockets: who is let in, what is answered, while the monitor goes on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/json_reader.h"
#include "monitor/feed.h"
#include "monitor/history.h"
#include "monitor/monitor.h"
#include "os/clock.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct fixture {
  char folder[64];
  feed ranks;
  even_monitor *monitor;
  int port;
  char token[64];
  char answer[1 << 20];
} fixture;

static even_status open_at(fixture *made, int port, even_monitor **out) {
  const even_monitor_params params = {.size = sizeof params,
                                      .run_folder = made->folder,
                                      .run_name = "served",
                                      .policy = "hybrid",
                                      .ranks = 2,
                                      .telemetry_fd = made->ranks.fd,
                                      .port = port};
  return even_monitor_open(&params, out);
}

static int set_up(void **state) {
  fixture *made = calloc(1, sizeof *made);
  const uint32_t shares[2] = {13, 3};
  (void)snprintf(made->folder, sizeof made->folder, "/tmp/evenstep-test-XXXXXX");
  if (mkdtemp(made->folder) == NULL) {
    return -1;
  }
  feed_open(&made->ranks, 2, 16, even_clock_ns());
  if (open_at(made, 0, &made->monitor) != EVEN_OK ||
      sscanf(even_monitor_url(made->monitor), "http://127.0.0.1:%d/?token=%63s", &made->port, made->token) != 2) {
    return -1;
  }
  even_monitor_attempt(made->monitor, 0);
  for (int i = 0; i < 50; i++) {
    feed_step(&made->ranks, shares);
  }
  *state = made;
  return even_monitor_tick(made->monitor) == EVEN_OK ? 0 : -1;
}

static int tear_down(void **state) {
  static const char *const names[] = {"run.db", "report.html", "run-previous.db"};
  fixture *made = *state;
  char path[128];
  if (even_monitor_close(made->monitor, 0) != EVEN_OK) {
    return -1;
  }
  feed_close(&made->ranks);
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    (void)snprintf(path, sizeof path, "%s/%s", made->folder, names[i]);
    (void)unlink(path);
  }
  int failed = rmdir(made->folder);
  free(made);
  return failed;
}

/* Sends a request as it stands; the answer's code, and the whole answer in made->answer. */
static int ask(fixture *made, const char *request) {
  struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)made->port)};
  size_t got = 0;
  int code = 0;
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_true(fd >= 0);
  assert_int_equal(connect(fd, (const struct sockaddr *)&where, sizeof where), 0);
  assert_int_equal(send(fd, request, strlen(request), MSG_NOSIGNAL), (ssize_t)strlen(request));
  for (;;) {
    ssize_t piece = read(fd, made->answer + got, sizeof made->answer - 1 - got);
    if (piece <= 0) {
      break;
    }
    got += (size_t)piece;
  }
  made->answer[got] = '\0';
  assert_int_equal(close(fd), 0);
  assert_int_equal(sscanf(made->answer, "HTTP/1.1 %d", &code), 1);
  return code;
}

/* A GET with the token as a header. */
static int get(fixture *made, const char *path) {
  char request[512];
  (void)snprintf(request, sizeof request,
                 "GET %s HTTP/1.1\r\nHost: localhost:%d\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n", path,
                 made->port, made->token);
  return ask(made, request);
}

static const char *body(const fixture *made) {
  const char *blank = strstr(made->answer, "\r\n\r\n");
  assert_non_null(blank);
  return blank + 4;
}

static json_t *body_json(const fixture *made) {
  json_t *value = NULL;
  assert_non_null(strstr(made->answer, "Content-Type: application/json"));
  assert_int_equal(even_json_parse("answer", body(made), strlen(body(made)), &value), EVEN_OK);
  return value;
}

static int ask_with(fixture *made, const char *line, const char *host, const char *header) {
  char request[1024];
  (void)snprintf(request, sizeof request, "%s HTTP/1.1\r\n%s%s\r\n%sConnection: close\r\n\r\n", line,
                 host[0] != '\0' ? "Host: " : "X-No-Host: ", host, header);
  return ask(made, request);
}

static void only_the_token_opens(void **state) {
  fixture *made = *state;
  char line[160];
  char header[160];
  assert_int_equal(ask_with(made, "GET /", "127.0.0.1", ""), 401);
  assert_non_null(strstr(made->answer, "WWW-Authenticate: Bearer"));
  assert_null(strstr(made->answer, made->token));
  assert_int_equal(ask_with(made, "GET /metrics", "127.0.0.1", "Authorization: Bearer x\r\n"), 401);
  for (int i = 0; i < 32; i += 31) { /* one digit wrong, the first or the last */
    char wrong[64];
    memcpy(wrong, made->token, sizeof wrong);
    wrong[i] = wrong[i] == '0' ? '1' : '0';
    (void)snprintf(line, sizeof line, "GET /?token=%s", wrong);
    assert_int_equal(ask_with(made, line, "127.0.0.1", ""), 401);
  }
  (void)snprintf(line, sizeof line, "GET /api/v1/summary?token=%.31s", made->token);
  assert_int_equal(ask_with(made, line, "127.0.0.1", ""), 401);
  (void)snprintf(line, sizeof line, "GET /?token=%s", made->token);
  assert_int_equal(ask_with(made, line, "127.0.0.1", ""), 200);
  (void)snprintf(header, sizeof header, "Set-Cookie: evenstep_%d=%s; Path=/; HttpOnly; SameSite=Strict", made->port,
                 made->token);
  assert_non_null(strstr(made->answer, header));
  (void)snprintf(header, sizeof header, "Cookie: evenstep_%d=%s\r\n", made->port, made->token);
  assert_int_equal(ask_with(made, "GET /", "127.0.0.1", header), 200);
  assert_null(strstr(made->answer, "Set-Cookie"));
  (void)snprintf(header, sizeof header, "Cookie: evenstep_%d=%s\r\n", made->port + 1, made->token);
  assert_int_equal(ask_with(made, "GET /", "127.0.0.1", header), 401);
}

static void other_hosts_and_methods_are_refused(void **state) {
  fixture *made = *state;
  char header[160];
  (void)snprintf(header, sizeof header, "Authorization: Bearer %s\r\n", made->token);
  assert_int_equal(ask_with(made, "GET /", "evil.example", header), 403);
  assert_int_equal(ask_with(made, "GET /", "127.0.0.1.evil.example:80", header), 403);
  int nameless = ask_with(made, "GET /", "", header);
  assert_true(nameless == 403 || nameless == 400); /* libmicrohttpd 1.0 refuses it itself, as RFC 9112 (3.2) has it */
  assert_int_equal(ask_with(made, "GET /", "LOCALHOST:1", header), 200);
  assert_int_equal(ask_with(made, "GET /", "[::1]:1", header), 200);
  assert_int_equal(ask_with(made, "POST /", "localhost", header), 405);
  assert_non_null(strstr(made->answer, "Allow: GET, HEAD"));
  assert_int_equal(ask_with(made, "DELETE /", "localhost", header), 405);
  /* nor is a body waited for, which might never come */
  assert_int_equal(ask_with(made, "POST /", "localhost", "Content-Length: 1000000\r\n"), 405);
  assert_int_equal(ask_with(made, "HEAD /", "localhost", header), 200);
  assert_string_equal(body(made), "");
  assert_int_equal(get(made, "/nothing"), 404);
  assert_int_equal(get(made, "/../run.db"), 404);
}

static void the_page_comes_with_its_guards(void **state) {
  fixture *made = *state;
  assert_int_equal(get(made, "/"), 200);
  assert_non_null(strstr(made->answer, "Content-Security-Policy: default-src 'none'"));
  assert_non_null(strstr(made->answer, "X-Content-Type-Options: nosniff"));
  assert_non_null(strstr(made->answer, "Referrer-Policy: no-referrer"));
  assert_non_null(strstr(made->answer, "Cache-Control: no-store"));
  assert_non_null(strstr(body(made), "<title>Evenstep</title>"));
  assert_null(strstr(body(made), "https://")); /* nothing is fetched from elsewhere */
  assert_null(strstr(body(made), made->token));
}

static void the_api_answers(void **state) {
  fixture *made = *state;
  assert_int_equal(get(made, "/api/v1/summary"), 200);
  json_t *answer = body_json(made);
  assert_string_equal(json_string_value(json_object_get(answer, "run")), "served");
  assert_int_equal(json_integer_value(json_object_get(answer, "step")), 49);
  json_decref(answer);
  assert_int_equal(get(made, "/api/v1/steps?since=40"), 200);
  answer = body_json(made);
  assert_int_equal(json_array_size(json_object_get(answer, "points")), 10);
  json_decref(answer);
  const char *const odd[] = {"since=-5", "since=x", "since=99999999999999999999", "limit=1", "limit=-1", "since="};
  for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
    char path[96];
    (void)snprintf(path, sizeof path, "/api/v1/steps?%s", odd[i]);
    assert_int_equal(get(made, path), 200);
    json_decref(body_json(made));
    (void)snprintf(path, sizeof path, "/api/v1/events?%s", odd[i]);
    assert_int_equal(get(made, path), 200);
    json_decref(body_json(made));
  }
  assert_int_equal(get(made, "/api/v1/spans"), 200);
  json_decref(body_json(made));
  assert_int_equal(get(made, "/metrics"), 200);
  assert_non_null(strstr(made->answer, "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8"));
  assert_non_null(strstr(body(made), "\nevenstep_steps_total 50\n"));
}

static void a_restart_sets_no_counter_back(void **state) {
  fixture *made = *state;
  const uint32_t shares[2] = {8, 8};
  even_monitor_attempt(made->monitor, 1);
  made->ranks.step = 30; /* from the last checkpoint on */
  feed_step(&made->ranks, shares);
  assert_int_equal(even_monitor_tick(made->monitor), EVEN_OK);
  assert_int_equal(get(made, "/metrics"), 200);
  assert_non_null(strstr(body(made), "\nevenstep_steps_total 51\n"));
  assert_non_null(strstr(body(made), "\nevenstep_step 31\n"));
}

static void when_it_began_needs_no_rows(void **state) {
  fixture *made = *state;
  even_history *history = NULL;
  assert_int_equal(even_history_open(made->folder, &history), EVEN_OK);
  uint64_t began = even_history_state(history)->started_wall_ns;
  assert_true(began > 0);
  even_history_close(history);
  char path[128];
  sqlite3 *other = NULL;
  (void)snprintf(path, sizeof path, "%s/run.db", made->folder);
  assert_int_equal(sqlite3_open(path, &other), SQLITE_OK);
  assert_int_equal(sqlite3_exec(other, "ALTER TABLE steps RENAME TO rows", NULL, NULL, NULL), SQLITE_OK);
  assert_int_not_equal(even_history_open(made->folder, &history), EVEN_OK);
  assert_int_equal(even_history_began(made->folder), began);
  assert_int_equal(sqlite3_exec(other, "ALTER TABLE rows RENAME TO steps", NULL, NULL, NULL), SQLITE_OK);
  assert_int_equal(sqlite3_close(other), SQLITE_OK);
  assert_int_equal(even_history_began("/nowhere"), 0);
}

static void a_port_in_use_is_an_error_with_the_fix(void **state) {
  fixture *made = *state;
  even_monitor *other = NULL;
  assert_int_equal(open_at(made, made->port, &other), EVEN_ERR_IN_USE);
  assert_null(other);
  assert_non_null(strstr(even_error_last()->fix, "--port, leave it out")); /* 0 is none that --port takes */
  char path[128];
  (void)snprintf(path, sizeof path, "%s/run-previous.db", made->folder);
  assert_int_equal(access(path, F_OK), -1); /* the history that is there was not touched */
}

typedef struct ticker {
  fixture *made;
  atomic_bool stop;
} ticker;

static void *tick_on(void *argument) {
  ticker *own = argument;
  const uint32_t shares[2] = {13, 3};
  while (!atomic_load(&own->stop)) {
    feed_step(&own->made->ranks, shares);
    if (even_monitor_tick(own->made->monitor) != EVEN_OK) {
      return own;
    }
  }
  return NULL;
}

static void answers_hold_while_the_run_goes_on(void **state) {
  fixture *made = *state;
  ticker own = {.made = made};
  pthread_t thread;
  void *failed = NULL;
  atomic_init(&own.stop, false);
  assert_int_equal(pthread_create(&thread, NULL, tick_on, &own), 0);
  for (int i = 0; i < 40; i++) {
    assert_int_equal(get(made, i % 2 == 0 ? "/api/v1/summary" : "/api/v1/steps"), 200);
    json_decref(body_json(made));
  }
  atomic_store(&own.stop, true);
  assert_int_equal(pthread_join(thread, &failed), 0);
  assert_null(failed);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      TEST(only_the_token_opens),
      TEST(other_hosts_and_methods_are_refused),
      TEST(a_restart_sets_no_counter_back),
      TEST(when_it_began_needs_no_rows),
      TEST(the_page_comes_with_its_guards),
      TEST(the_api_answers),
      TEST(a_port_in_use_is_an_error_with_the_fix),
      TEST(answers_hold_while_the_run_goes_on),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
