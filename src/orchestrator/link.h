/* One connection between two agents: a socket, TLS with the job's key, messages, and signs of life. It never waits:
 * what does not go out at once is kept. */
#ifndef EVEN_ORCHESTRATOR_LINK_H
#define EVEN_ORCHESTRATOR_LINK_H

#include "base/text.h"
#include "orchestrator/message.h"
#include "os/loop.h"
#include "os/tls.h"

typedef struct even_link even_link;

typedef struct even_link_calls {
  void *context;
  /* Both ends have proved that they have the key. */
  void (*ready)(void *context, even_link *link);
  /* A message; it is gone when this returns. An error ends the link, for that reason. */
  even_status (*message)(void *context, even_link *link, const even_message *message);
  /* It has ended: even_link_why says why. Called once, never from within a call of ours. */
  void (*ended)(void *context, even_link *link);
} even_link_calls;

/* So much may wait to go out before what can be left out (lines, telemetry) is. */
enum { EVEN_LINK_ROOM = 4 << 20 };
/* Of links in this process, by the silence of connections (os/socket.h), which is S: how often each end gives a sign of
 * life, an eighth of S, at most 5 s; */
uint64_t even_link_beat_ns(void);
/* and an agent that says nothing for so long stands still, though its host lives: 30 s, at least S. Where another host
 * takes the leader's place: of an S below 4 s 7.5 S, above 10 s 3 S, which is longer than that one is waited for
 * (leadership.h). */
uint64_t even_link_silence_ns(void);
/* Whether that is so in this process's job: all its links go by it. Any thread. */
void even_link_leaders_change(bool change);

struct even_link {
  even_loop *loop;
  even_loop_watch watch;
  int fd; /* -1: ended */
  even_tls *tls;
  even_link_calls calls;
  even_text in;  /* what came, of the message that is not whole yet */
  even_text out; /* what the kernel has not taken yet, from `sent` on */
  size_t sent;
  bool was_ready;
  bool ended_told;
  bool broken; /* nothing can be sent any more; what the other end said before is read until the next tick */
  bool failed; /* it shall end in the next tick */
  even_error why;
  char peer[64];
  uint64_t heard_ns;      /* when anything came last */
  uint64_t beat_ns;       /* when a sign of life was sent last */
  uint64_t echo;          /* the other end's clock, as its last beat said it, */
  uint64_t echo_ns;       /* and when that came */
  uint64_t least_trip_ns; /* of the beats' ways there and back, the shortest seen lately */
  int64_t offset_ns;      /* to be added to the other end's clock to have ours, by that one */
  bool offset_known;
  even_link *next; /* its owner's, for a list of those that have ended */
};

/* Takes `fd` over, also on failure. `link` must stay in place until the turn of the loop after its end. */
even_status even_link_open(even_link *link, even_loop *loop, int fd, bool server,
                           const unsigned char key[EVEN_TLS_KEY_BYTES], const even_link_calls *calls) EVEN_MUST_USE;
/* Sends a message; `json` NULL: none. Fails only for what the caller did wrong or for lack of memory; a broken
 * connection is told by `ended`. */
even_status even_link_send(even_link *link, even_message_kind kind, const char *json, const void *data,
                           size_t bytes) EVEN_MUST_USE;
/* Sends the JSON that `json` holds, with data, and frees it, also on failure. Fails as even_link_send does, and where
 * the text did not get all of its memory. */
even_status even_link_send_text(even_link *link, even_message_kind kind, even_text *json, const void *data,
                                size_t bytes) EVEN_MUST_USE;
/* How many bytes wait to go out. */
size_t even_link_waiting(const even_link *link);
/* Whether there is room for what can be left out. */
bool even_link_has_room(const even_link *link);
/* Whether messages can be sent. */
bool even_link_is_up(const even_link *link);
/* Sends signs of life, looks for the other end's (`watched`), tells of the end. Several times a second. */
void even_link_tick(even_link *link, bool watched);
/* The last error is why it shall end, in the next tick: as one whose other end says nothing. */
void even_link_give_up(even_link *link);
/* Takes what has come and was not read yet: the other end is about to be another one. */
void even_link_read(even_link *link);
/* Waits until all is sent, at most for so long; reads nothing, so that calls of the link's own may call it. */
void even_link_flush(even_link *link, int timeout_ms);
/* Why it ended. */
const even_error *even_link_why(const even_link *link);
/* Of one that has ended: whether the other end, or its kernel in the place of a process that has ended, has closed it;
 * else nothing came back any more. */
bool even_link_was_closed(const even_link *link);
/* Says goodbye and frees everything; calls nobody. A zeroed link with fd -1 is allowed. */
void even_link_close(even_link *link);

#endif
