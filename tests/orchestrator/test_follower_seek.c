/* A host that would join, while another one takes a lost leader's place: a child plays the job's hosts, which are
 * addresses of this machine, and says of each what a host says then. */
#include "orchestrator/hosts.h"

#include "base/fail.h"
#include "orchestrator/link.h"
#include "os/calls.h"
#include "os/listener.h"
#include "os/signals.h"
#include "os/socket.h"
#include "support/clock_ahead.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define THERE "127.0.0.3, at this port"
#define PAUSE_NS 12000000000u
#define KEY "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"

/* ---- the hosts ---- */

typedef struct scene {
  even_link link;
  even_loop loop;
  even_loop_watch listening;
  unsigned char key[EVEN_TLS_KEY_BYTES];
  bool open; /* the link is */
  bool over; /* and has been said what there is to say */
  int port;
  int turn;
} scene;

/* What is asked, one after the other, and what is answered; "": the host dies. */
static const struct {
  const char *address;
  even_message_kind kind;
  const char *says;
} turns[] = {{"127.0.0.1", EVEN_MESSAGE_LEADER, "{\"address\":\"\",\"port\":0,\"silence_ms\":20000}"},
             {"127.0.0.2", EVEN_MESSAGE_LEADER, ""},
             {"127.0.0.1", EVEN_MESSAGE_LEADER, "{\"silence_ms\":20000}"},
             {"127.0.0.2", EVEN_MESSAGE_LEADER, THERE},
             {"127.0.0.3", EVEN_MESSAGE_REFUSE, "{\"what\":\"the job is full\",\"fix\":\"\"}"}};

enum { TURNS = sizeof turns / sizeof turns[0] };

static void on_ready(void *context, even_link *link) {
  (void)context;
  (void)link;
}

static even_status on_message(void *context, even_link *link, const even_message *message) {
  scene *at = context;
  char words[100];
  char address[64];
  even_socket_local(link->fd, address, sizeof address);
  if (message->kind == EVEN_MESSAGE_BEAT) {
    return EVEN_OK;
  }
  if (message->kind != EVEN_MESSAGE_GREET || at->turn >= TURNS || strcmp(address, turns[at->turn].address) != 0) {
    (void)fprintf(stderr, "turn %d: %s was told %d\n", at->turn, address, (int)message->kind);
    _exit(2);
  }
  const char *says = turns[at->turn].says;
  even_message_kind kind = turns[at->turn].kind;
  at->turn++;
  (void)snprintf(words, sizeof words, "{\"address\":\"127.0.0.3\",\"port\":%d,\"silence_ms\":20000}", at->port);
  return says[0] == '\0' ? even_fail(EVEN_ERR_PEER_LOST, "this host dies")
                         : even_link_send(link, kind, strcmp(says, THERE) == 0 ? words : says, NULL, 0);
}

static void on_ended(void *context, even_link *link) {
  (void)link;
  ((scene *)context)->over = true;
}

static void on_connection(void *context, int fd) {
  scene *at = context;
  const even_link_calls calls = {.context = at, .ready = on_ready, .message = on_message, .ended = on_ended};
  int made = -1;
  if (at->open || even_socket_accept(fd, &made) != EVEN_OK || made < 0) {
    even_error_clear(); /* one after the other */
    return;
  }
  at->open = even_link_open(&at->link, &at->loop, made, true, at->key, &calls) == EVEN_OK;
}

/* Ends with 0 once all turns were played. */
static int play(scene *at, int listener) {
  if (even_loop_open(&at->loop) != EVEN_OK || even_tls_key_read(KEY, at->key) != EVEN_OK ||
      even_loop_add(&at->loop, &at->listening, listener, on_connection, at) != EVEN_OK) {
    return 1;
  }
  while (at->turn < TURNS || at->open) {
    if (even_loop_turn(&at->loop, 20) != EVEN_OK) {
      return 1;
    }
    if (at->open) {
      even_link_tick(&at->link, false);
    }
    if (at->over) {
      even_link_close(&at->link);
      at->open = at->over = false;
    }
  }
  return 0;
}

/* ---- the host that would join ---- */

/* Each pause between two questions takes PAUSE_NS of its time: it asks for longer than hosts of four seconds' silence
 * want to lead, and not as long as those of twenty. */
static int pause_longer(int fd, struct epoll_event *events, int most, int timeout_ms) {
  clock_ahead_add(timeout_ms == 500 ? PAUSE_NS : 0);
  return even_os_real.epoll_wait(fd, events, most, timeout_ms);
}

static void it_asks_one_after_the_other_until_the_leader_answers(void **state) {
  static scene at;
  const even_join_wish wish = {.ranks = 1};
  struct even_estate *estate = NULL;
  char line[400];
  bool met = true;
  int code = 0;
  int listener = -1;
  int ended = 0;
  (void)state;
  assert_int_equal(even_listener_open("0.0.0.0", &at.port, &listener), EVEN_OK);
  pid_t child = fork();
  if (child == 0) {
    (void)alarm(300); /* nobody asks any more */
    _exit(play(&at, listener));
  }
  even_listener_close(listener);
  (void)snprintf(line, sizeof line,
                 "{\"key\":\"" KEY "\",\"host\":0,\"port\":%d,\"addresses\":[\"127.0.0.1\",\"127.0.0.2\"]}", at.port);
  assert_int_equal(even_signals_block(), EVEN_OK);
  even_os.epoll_wait = pause_longer;
  even_status status = even_hosts_serve(line, &wish, &met, &estate, NULL, &code);
  even_os = even_os_real;
  if (strstr(even_error_last()->what, "the leader refuses: the job is full") == NULL) {
    fail_msg("%s: %s", even_status_name(status), even_error_last()->what);
  }
  assert_int_equal(status, EVEN_ERR_UNSUPPORTED);
  assert_int_equal(code, 8);
  assert_int_equal(even_socket_silence(), 20000); /* as the hosts say */
  assert_false(met);
  assert_null(estate);
  assert_int_equal(waitpid(child, &ended, 0), child);
  assert_int_equal(ended, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(it_asks_one_after_the_other_until_the_leader_answers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
