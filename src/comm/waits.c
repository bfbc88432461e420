/* What this process's threads wait in, and telling it: on the pads of all of its groups, and to those that ask. */
#include "comm/waits.h"

#include "comm/board.h"
#include "comm/group.h"
#include "comm/messages.h"
#include "comm/watcher.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/host.h"
#include "os/process_stat.h"
#include "os/thread.h"

#include <stdio.h>
#include <string.h>

typedef enum thread_state { THREAD_GOES_ON, THREAD_RESTS, THREAD_WAITS } thread_state;

/* A thread that calls, or has called. */
typedef struct calling_thread {
  struct calling_thread *next;
  bool known;
  bool first;   /* of the process */
  bool carries; /* even_waits_carry */
  thread_state state;
  const _Atomic uint32_t *word; /* of one that rests */
  uint32_t seen;
  even_wait_words words; /* of one that waits, */
  const void *message;   /* and for which. Of one that rests behind another, `words.site` is where */
  const void *group;     /* in which it waits, or rests behind who does; NULL: none. Not looked into */
} calling_thread;

static _Thread_local calling_thread own;

static struct {
  pthread_mutex_t lock; /* over all of this; taken before no other */
  calling_thread *threads;
  even_comm *groups;
  uint64_t process;
  uint64_t change;
  uint64_t whole_change;   /* at which all were seen to wait, */
  uint64_t whole_ns;       /* since then, */
  uint64_t whole_seen_ns;  /* and last then */
  even_wait_place network; /* of the largest group over the network, `group`, in which one has waited; ranks 0: none */
  even_far_known far;
  uint64_t found_change; /* the waits up to this change are a part of what was found; 0: nothing was */
  even_circle_found found;
} here = {.lock = PTHREAD_MUTEX_INITIALIZER, .network.rank = -1};

/* Over the network: messages that have begun and not ended; work that threads of the engine's own do. */
static _Atomic size_t network_messages;
static _Atomic size_t network_carriers;
static _Atomic uint64_t circles; /* so many were found with this process in them */

static even_process_words told; /* what is there to be told, under the lock */

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static pthread_key_t thread_ends;
static _Atomic bool unprepared; /* threads that end are not noticed: nothing is ever known of all of them */

static _Atomic(even_waits_others_call *) others_call;
static _Atomic(void *) others_context;

/* ---- the threads ---- */

static void forget_thread(void *thread) {
  (void)pthread_mutex_lock(&here.lock);
  calling_thread **at = &here.threads;
  while (*at != NULL && *at != thread) {
    at = &(*at)->next;
  }
  if (*at != NULL) {
    *at = (*at)->next;
    here.change++;
  }
  ((calling_thread *)thread)->known = false;
  (void)pthread_mutex_unlock(&here.lock);
}

/* A child has one thread, none of its parent's groups, and perhaps a lock that nobody there will give back. */
static void begin_again(void) {
  (void)pthread_mutex_init(&here.lock, NULL);
  here.threads = NULL;
  here.groups = NULL;
  here.process = 0;
  here.network = (even_wait_place){.rank = -1};
  here.found_change = 0;
  here.far.count = here.far.next = 0;
  atomic_store(&network_messages, 0);
  atomic_store(&network_carriers, 0);
  own.known = false;
}

static void prepare(void) {
  if (pthread_key_create(&thread_ends, forget_thread) != 0 || !even_process_fork_calls(begin_again)) {
    atomic_store(&unprepared, true);
  }
}

/* Hosts' clocks and numbers may be the same. */
static uint64_t new_process(void) {
  char host[EVEN_BOARD_HOST_BYTES];
  even_host_identity(host, sizeof host);
  uint64_t mark =
      even_clock_ns() ^ (uint64_t)even_own_process() << 40 ^ (uint64_t)even_host_mark(host, sizeof host) << 8;
  mark = (mark ^ (mark >> 30)) * 0xbf58476d1ce4e5b9u; /* splitmix64, as in call.c */
  mark = (mark ^ (mark >> 27)) * 0x94d049bb133111ebu;
  return (mark ^ (mark >> 31)) | 1u;
}

static void meet_thread(void) {
  (void)pthread_once(&prepared, prepare);
  if (atomic_load(&unprepared) || pthread_setspecific(thread_ends, &own) != 0) {
    atomic_store(&unprepared, true);
    return;
  }
  (void)pthread_mutex_lock(&here.lock);
  own = (calling_thread){.next = here.threads, .known = true, .first = even_os.gettid() == even_own_process()};
  here.threads = &own;
  here.process = here.process == 0 ? new_process() : here.process;
  here.change++;
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_call(void) {
  if (!own.known) {
    meet_thread();
  }
}

void even_waits_carry(void) {
  even_waits_call();
  own.carries = true;
}

static void go_on(void) {
  (void)pthread_mutex_lock(&here.lock);
  own.state = THREAD_GOES_ON;
  here.change++;
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_rest(const _Atomic uint32_t *word, uint32_t seen) {
  even_waits_call();
  bool already = own.state == THREAD_RESTS && own.word == word && own.seen == seen;
  if (own.known && !already) {
    (void)pthread_mutex_lock(&here.lock);
    own.word = word;
    own.seen = seen;
    own.group = NULL;
    own.state = THREAD_RESTS;
    here.change++;
    (void)pthread_mutex_unlock(&here.lock);
  }
}

void even_waits_go_on(void) {
  if (own.known && own.state != THREAD_GOES_ON) {
    go_on();
  }
}

bool even_waits_rested_on(const _Atomic uint32_t *word) {
  bool found = false;
  (void)pthread_mutex_lock(&here.lock);
  for (const calling_thread *thread = here.threads; thread != NULL && !found; thread = thread->next) {
    found = thread->state == THREAD_RESTS && thread->word == word && atomic_load(word) == thread->seen;
  }
  (void)pthread_mutex_unlock(&here.lock);
  return found;
}

void even_waits_ask_others(even_waits_others_call *call, void *context) {
  atomic_store(&others_context, context);
  atomic_store(&others_call, call);
}

/* ---- the groups ---- */

void even_waits_open(even_comm *comm) {
  if (comm->pads == NULL) {
    return;
  }
  even_waits_call();
  (void)pthread_mutex_lock(&here.lock);
  here.process = here.process == 0 ? new_process() : here.process;
  atomic_store(&even_comm_pad_of(comm, comm->rank)->process, here.process);
  comm->next_group = here.groups;
  here.groups = comm;
  here.change++;
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_close(even_comm *comm) {
  (void)pthread_mutex_lock(&here.lock);
  even_comm **at = &here.groups;
  while (*at != NULL && *at != comm) {
    at = &(*at)->next_group;
  }
  if (*at != NULL) { /* not in a child of a fork, whose parent goes on with it */
    *at = comm->next_group;
    here.change++;
    atomic_store(&even_comm_pad_of(comm, comm->rank)->version, 0);
  }
  here.network = here.network.group == comm ? (even_wait_place){.rank = -1} : here.network;
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_join(even_comm *comm, const even_comm_whole *whole) {
  (void)pthread_mutex_lock(&here.lock);
  comm->whole = *whole;
  comm->numbers = whole->numbers;
  (void)pthread_mutex_unlock(&here.lock);
}

static int rank_of_process(void) {
  even_wait_place largest = here.network;
  for (even_comm *group = here.groups; group != NULL; group = group->next_group) {
    const even_wait_place place = even_waits_place(group);
    largest = place.ranks >= largest.ranks ? place : largest; /* of several the oldest */
  }
  return largest.rank;
}

/* ---- telling ---- */

/* Whether a thread before this one in the list waits for the same message. */
static bool is_counted(const calling_thread *thread) {
  for (const calling_thread *before = here.threads; before != thread; before = before->next) {
    if (before->state == THREAD_WAITS && before->words.message != 0 && before->message == thread->message) {
      return true;
    }
  }
  return false;
}

/* Whether each thread that has called waits, or rests until one of them has it go on, and nothing else of theirs is
 * under way that could let them. Of a message that only has begun, others could. */
static bool all_wait(int *threads) {
  size_t waits = 0;
  size_t messages = 0;
  size_t open = 0;
  bool first = false;
  *threads = 0;
  for (const calling_thread *thread = here.threads; thread != NULL; thread = thread->next) {
    ++*threads;
    if (thread->state == THREAD_GOES_ON ||
        (thread->state == THREAD_RESTS && thread->word != NULL && atomic_load(thread->word) != thread->seen)) {
      return false;
    }
    first = first || thread->first;
    if (thread->state == THREAD_WAITS) {
      waits++;
      messages += thread->words.message != 0 && !is_counted(thread);
    }
  }
  for (const even_comm *group = here.groups; group != NULL; group = group->next_group) {
    open += atomic_load(&group->messages->open);
  }
  open += atomic_load(&network_messages);
  return first && waits > 0 && waits <= EVEN_WAITS && open == messages && atomic_load(&network_carriers) == 0 &&
         !atomic_load(&unprepared);
}

/* Whether one may call that has not called yet; `threads` have. */
static even_waits_others ask_others(int threads) {
  even_process_stat facts;
  even_waits_others_call *call = atomic_load(&others_call);
  if (call != NULL) {
    return call(atomic_load(&others_context));
  }
  bool all = even_process_stat_read(0, &facts) == 0 && facts.threads == threads;
  return all ? EVEN_WAITS_OTHERS_NONE : EVEN_WAITS_OTHERS_MAY;
}

/* Whether all wait that can call. What was known before stays known to a thread that cannot ask: who could says so
 * again for as long as it is so. */
static void look_at_all(void) {
  int threads = 0;
  uint64_t looked_ns = even_clock_ns();
  (void)pthread_mutex_lock(&here.lock);
  uint64_t change = here.change;
  bool whole = all_wait(&threads);
  (void)pthread_mutex_unlock(&here.lock);
  even_waits_others others = whole ? ask_others(threads) : EVEN_WAITS_OTHERS_MAY;
  (void)pthread_mutex_lock(&here.lock);
  bool known = here.whole_change == change && here.whole_ns != 0;
  if (here.change != change || others == EVEN_WAITS_OTHERS_MAY || (others == EVEN_WAITS_OTHERS_UNKNOWN && !known)) {
    here.whole_change = 0;
    here.whole_ns = 0;
  } else if (others == EVEN_WAITS_OTHERS_NONE) {
    here.whole_change = change;
    here.whole_ns = known ? here.whole_ns : even_clock_ns();
    here.whole_seen_ns = looked_ns;
  }
  (void)pthread_mutex_unlock(&here.lock);
}

/* Where a thread rests behind the one that waits: that one has a line of the program. */
static const char *site_behind(const calling_thread *waits) {
  for (const calling_thread *thread = here.threads; thread != NULL; thread = thread->next) {
    if (thread->state == THREAD_RESTS && thread->group != NULL && thread->group == waits->group &&
        thread->words.site[0] != '\0') {
      return thread->words.site;
    }
  }
  return waits->words.site;
}

static void tell_all(void) {
  even_process_words *words = &told;
  *words = (even_process_words){.process = here.process,
                                .change = here.change,
                                .whole_ns = here.whole_ns,
                                .whole_seen_ns = here.whole_seen_ns,
                                .rank = rank_of_process()};
  for (int firsts = 1; firsts >= 0; firsts--) {
    for (const calling_thread *thread = here.threads; thread != NULL; thread = thread->next) {
      if (thread->state == THREAD_WAITS && thread->words.main == (uint32_t)firsts && words->waits < EVEN_WAITS) {
        even_wait_words *wait = &words->wait[words->waits++];
        *wait = thread->words;
        (void)snprintf(wait->site, sizeof wait->site, "%s", site_behind(thread));
      }
    }
  }
  for (even_comm *group = here.groups; group != NULL; group = group->next_group) {
    even_waits_write(even_comm_pad_of(group, group->rank), words);
  }
}

static void keep_found(uint64_t change, const even_circle_found *found) {
  if (here.found_change < change) {
    here.found = *found;
    here.found_change = change;
    (void)atomic_fetch_add(&circles, 1);
  }
}

static void tell(const even_wait_place *place, even_waiting *waiting, const even_wait_words *words,
                 const void *message) {
  even_circle_found found;
  (void)pthread_mutex_lock(&here.lock);
  if (!waiting->told) {
    own.state = THREAD_WAITS;
    own.words.number = ++here.change;
    waiting->told = true;
  }
  uint64_t number = own.words.number;
  own.words = *words;
  own.words.number = number;
  own.message = message;
  own.group = place->group;
  (void)pthread_mutex_unlock(&here.lock);
  look_at_all();
  (void)pthread_mutex_lock(&here.lock);
  tell_all();
  if (here.whole_ns != 0 && even_waits_look_for_circle(here.groups, &told, &here.far, even_clock_ns(), &found)) {
    keep_found(told.change, &found);
  }
  (void)pthread_mutex_unlock(&here.lock);
}

/* Whether the wait of that number was found to be a part of a circle: here, or as a pad of any of the groups says. Then
 * the others of the host find it, too. With the lock held. */
static bool find_found(uint64_t number, even_circle_found *found) {
  bool is = here.found_change != 0 && here.found_change >= number;
  if (is) {
    *found = here.found;
  }
  for (even_comm *group = here.groups; group != NULL && !is; group = group->next_group) {
    is = even_waits_read_found(even_comm_pad_of(group, group->rank), here.process, number, found);
  }
  if (is) {
    keep_found(number, found);
    even_waits_pass_on(here.groups, found);
  }
  return is;
}

/* Over the network they find it before this rank's groups end, and it leaves those in which it is waited for. */
static bool was_found(uint64_t number, even_circle_found *found) {
  (void)pthread_mutex_lock(&here.lock);
  bool is = find_found(number, found);
  (void)pthread_mutex_unlock(&here.lock);
  if (is) {
    even_watcher_look();
  }
  return is;
}

bool even_waits_end(even_waiting *waiting) {
  even_circle_found found;
  bool is = false;
  if (waiting->told) {
    waiting->told = false;
    (void)pthread_mutex_lock(&here.lock);
    is = find_found(own.words.number, &found); /* who was told may have ended the group before it was read here */
    own.state = THREAD_GOES_ON;
    here.change++;
    here.whole_change = 0;
    here.whole_ns = 0;
    tell_all();
    (void)pthread_mutex_unlock(&here.lock);
  }
  return is;
}

bool even_waits_is_told(const even_waiting *waiting, uint64_t since_ns, uint64_t now_ns) {
  return own.known && (waiting->told || now_ns - since_ns >= EVEN_WAITS_TOLD_NS);
}

static bool is_told(const even_comm *comm, const even_waiting *waiting, uint64_t since_ns, uint64_t now_ns) {
  return comm->pads != NULL && even_waits_is_told(waiting, since_ns, now_ns);
}

/* Whether all threads have been seen to wait, and none has gone on since: who is asked then keeps none waiting. */
static bool was_whole(void) {
  (void)pthread_mutex_lock(&here.lock);
  bool whole = here.whole_ns != 0 && here.whole_change == here.change;
  (void)pthread_mutex_unlock(&here.lock);
  return whole;
}

/* `message`: of which; NULL: in a collective. */
static bool look(even_comm *comm, const even_wait_place *place, even_waiting *waiting, even_wait_words *words,
                 const void *message, even_circle_found *found) {
  uint64_t now_ns = words->seen_ns;
  uint64_t waited_ns = now_ns - words->since_ns;
  if (now_ns - waiting->told_ns >= EVEN_WAITS_TOLD_NS) {
    waiting->told_ns = now_ns;
    if (!own.carries && !waiting->asked && waited_ns >= EVEN_WAITS_ASKED_NS && was_whole()) {
      even_waits_ask_site(place, waiting, message == NULL);
    } else if (!waiting->asked && message == NULL) {
      (void)even_waits_read_site(place, waiting); /* what the caller has said itself */
    }
    memcpy(words->site, waiting->site, sizeof words->site);
    words->main = own.first ? 1 : 0;
    even_waits_name_group(comm, place, words->group, sizeof words->group);
    tell(place, waiting, words, message);
  }
  return waiting->told && was_found(own.words.number, found);
}

/* `late`: a rank that this one waits for; -1: none in particular. */
static bool look_and_end(even_comm *comm, even_waiting *waiting, even_wait_words *words, int late,
                         const void *message) {
  const even_wait_place place = even_waits_place(comm);
  even_circle_found found;
  if (!look(comm, &place, waiting, words, message, &found)) {
    return false;
  }
  found.why.rank = late < 0 ? -1 : even_comm_number(comm, late);
  even_group_end_told(comm, &found.why);
  return !even_group_whole(comm); /* whole: another died that was about to say why */
}

void even_waits_rest_behind(even_comm *comm, even_waiting *waiting, const _Atomic uint32_t *word, uint32_t seen,
                            uint64_t since_ns) {
  uint64_t now_ns = even_clock_ns();
  even_waits_rest(word, seen);
  if (!own.known || now_ns - since_ns < EVEN_WAITS_TOLD_NS || now_ns - waiting->told_ns < EVEN_WAITS_TOLD_NS) {
    return;
  }
  waiting->told_ns = now_ns;
  if (!waiting->asked && now_ns - since_ns >= EVEN_WAITS_ASKED_NS && was_whole()) {
    const even_wait_place place = even_waits_place(comm);
    even_waits_ask_site(&place, waiting, false);
    (void)pthread_mutex_lock(&here.lock);
    memcpy(own.words.site, waiting->site, sizeof own.words.site);
    own.group = place.group;
    (void)pthread_mutex_unlock(&here.lock);
  }
  look_at_all();
}

static void wait_for(const even_comm *comm, even_wait_words *words, int rank) {
  even_circle_need(&words->needs, atomic_load(&even_comm_pad_of(comm, rank)->process), 0);
}

bool even_waits_in_collective(even_comm *comm, even_waiting *waiting, uint64_t now_ns) {
  even_wait_words words = {.since_ns = comm->waits_since, .seen_ns = now_ns};
  int late = -1;
  if (!is_told(comm, waiting, comm->waits_since, now_ns)) {
    return false;
  }
  if (comm->chain.under_way) {
    late = even_chain_missing(comm);
    if (late == comm->ranks) {
      return false;
    }
    wait_for(comm, &words, late);
  }
  for (int rank = 0; rank < comm->ranks && !comm->chain.under_way; rank++) {
    if (!even_stage_has_come(comm, rank)) {
      late = late < 0 ? rank : late;
      wait_for(comm, &words, rank);
    }
  }
  even_call_describe(comm->whole.call != NULL ? comm->whole.call : &comm->call, words.doing, sizeof words.doing);
  return look_and_end(comm, waiting, &words, late, NULL);
}

bool even_waits_for_message(even_comm *comm, even_waiting *waiting, const void *message, const char *doing, int peer,
                            uint64_t since_ns, uint64_t now_ns) {
  even_wait_words words = {
      .since_ns = since_ns, .seen_ns = now_ns, .message = 1, .needs.any = peer == EVEN_COMM_ANY_RANK ? 1 : 0};
  if (!is_told(comm, waiting, since_ns, now_ns)) {
    return false;
  }
  for (int rank = 0; rank < comm->ranks; rank++) {
    if (rank == peer || (words.needs.any != 0 && rank != comm->rank && atomic_load(&comm->controls[rank].left) == 0)) {
      wait_for(comm, &words, rank);
    }
  }
  (void)snprintf(words.doing, sizeof words.doing, "%s", doing);
  return look_and_end(comm, waiting, &words, words.needs.any != 0 ? -1 : peer, message);
}

/* ---- over the network ---- */

void even_waits_message_begins(void) {
  (void)atomic_fetch_add(&network_messages, 1);
}

void even_waits_message_ends(void) {
  (void)atomic_fetch_sub(&network_messages, 1);
}

void even_waits_carrier_begins(void) {
  (void)atomic_fetch_add(&network_carriers, 1);
}

void even_waits_carrier_ends(void) {
  if (atomic_load(&network_carriers) > 0) {
    (void)atomic_fetch_sub(&network_carriers, 1);
  }
}

bool even_waits_in_network(even_comm *comm, even_waiting *waiting, even_wait_words *words, const void *message,
                           even_circle_found *found) {
  const even_wait_place place = even_waits_place(comm);
  (void)pthread_mutex_lock(&here.lock);
  if (place.ranks > here.network.ranks) {
    here.network = place;
    here.network.group = comm;
  }
  (void)pthread_mutex_unlock(&here.lock);
  return look(comm, &place, waiting, words, message, found);
}

size_t even_waits_answer(uint64_t turn, even_far_waits *out) {
  int threads = 0;
  size_t count = 0;
  out[0] = (even_far_waits){.process = 0};
  (void)pthread_mutex_lock(&here.lock);
  if (here.whole_ns != 0 && here.whole_change == here.change && told.change == here.change && all_wait(&threads)) {
    count = even_waits_gather(here.groups, &told, &here.far, even_clock_ns(), turn, out);
  }
  out[0].process = here.process;
  (void)pthread_mutex_unlock(&here.lock);
  return count > 0 ? count : 1;
}

void even_waits_hear(const even_far_waits *words) {
  (void)pthread_mutex_lock(&here.lock);
  even_waits_keep(&here.far, here.process, words, even_clock_ns());
  (void)pthread_mutex_unlock(&here.lock);
}

void even_waits_hear_found(const even_circle_found *found) {
  even_circle_found kept = *found;
  uint64_t change = 0;
  even_circle_bound_members(&kept.members);
  (void)pthread_mutex_lock(&here.lock);
  if (here.process != 0 && even_circle_has(&kept.members, here.process, &change) && change == here.change) {
    keep_found(change, &kept);
  }
  (void)pthread_mutex_unlock(&here.lock);
}

uint64_t even_waits_found(uint64_t passed, even_circle_found *found) {
  uint64_t number = atomic_load(&circles);
  if (number > passed) {
    (void)pthread_mutex_lock(&here.lock);
    number = atomic_load(&circles);
    *found = here.found;
    (void)pthread_mutex_unlock(&here.lock);
  }
  return number;
}

uint64_t even_waits_process(void) {
  (void)pthread_mutex_lock(&here.lock);
  uint64_t process = here.process;
  (void)pthread_mutex_unlock(&here.lock);
  return process;
}
