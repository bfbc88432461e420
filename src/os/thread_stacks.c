/* A slot a thread: asked for, being filled by the thread's handler, taken. One whose thread answers late is left to it.
 */
#include "os/thread_stacks.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/clock.h"
#include "os/entries.h"
#include "os/futex.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_include)
#if __has_include(<execinfo.h>)
#include <execinfo.h>
#define HAS_BACKTRACE 1
#endif
#endif
#ifndef HAS_BACKTRACE
#define HAS_BACKTRACE 0
#endif

enum { MOST_THREADS = 128, MOST_FRAMES = 48, OWN_FRAMES = 2, NAME_BYTES = 24 };

enum { SLOT_FREE, SLOT_ASKED, SLOT_FILLS, SLOT_TAKEN };

typedef struct stack_slot {
  _Atomic int state;
  _Atomic int thread;
  int count;
  void *frames[MOST_FRAMES];
} stack_slot;

static stack_slot slots[MOST_THREADS];
static _Atomic uint32_t answers; /* grows with each stack that was taken */
static _Atomic int stack_signal; /* 0: not open */

static void ignore(int number) {
  (void)number;
}

even_status even_signal_reserve(int *number) {
  struct sigaction handled;
  struct sigaction action = {.sa_handler = ignore, .sa_flags = SA_RESTART};
  for (int at = SIGRTMAX - 1; at > SIGRTMIN; at--) {
    if (even_os.sigaction(at, NULL, &handled) == 0 && (handled.sa_flags & SA_SIGINFO) == 0 &&
        handled.sa_handler == SIG_DFL && even_os.sigaction(at, &action, NULL) == 0) {
      *number = at;
      return EVEN_OK;
    }
  }
  return even_fail(EVEN_ERR_IN_USE, "no real-time signal is free in this process");
}

static bool is_handled(int number) {
  struct sigaction handled;
  return even_os.sigaction(number, NULL, &handled) == 0 &&
         ((handled.sa_flags & SA_SIGINFO) != 0 || (handled.sa_handler != SIG_DFL && handled.sa_handler != SIG_IGN));
}

void even_signal_raise_here(int number) {
  sigset_t one;
  if (!is_handled(number)) {
    return;
  }
  (void)sigemptyset(&one);
  (void)sigaddset(&one, number);
  (void)even_os.mask_signals(SIG_UNBLOCK, &one, NULL);
  (void)even_os.tgkill(even_os.getpid(), even_os.gettid(), number); /* delivered before it returns */
  (void)even_os.mask_signals(SIG_BLOCK, &one, NULL);
}

static int take_frames(void **frames) {
#if HAS_BACKTRACE
  return backtrace(frames, MOST_FRAMES);
#else
  (void)frames;
  return 0;
#endif
}

/* In the thread that was asked. */
static void take(int number) {
  const int before = errno;
  int self = (int)even_os.gettid();
  (void)number;
  for (int i = 0; i < MOST_THREADS; i++) {
    int asked = SLOT_ASKED;
    if (atomic_load(&slots[i].thread) == self && atomic_compare_exchange_strong(&slots[i].state, &asked, SLOT_FILLS)) {
      slots[i].count = take_frames(slots[i].frames);
      atomic_store(&slots[i].state, SLOT_TAKEN);
      (void)atomic_fetch_add(&answers, 1u);
      even_futex_wake_all(&answers);
      break;
    }
  }
  errno = before;
}

even_status even_thread_stacks_open(void) {
  void *frames[MOST_FRAMES];
  int number = 0;
  if (!HAS_BACKTRACE) {
    return even_fail(EVEN_ERR_UNSUPPORTED, "this C library has no backtrace(3)");
  }
  if (atomic_load(&stack_signal) != 0) {
    return EVEN_OK;
  }
  (void)take_frames(frames); /* the first call loads libgcc */
  EVEN_TRY(even_signal_reserve(&number));
  struct sigaction action = {.sa_handler = take, .sa_flags = SA_RESTART | SA_ONSTACK};
  (void)sigfillset(&action.sa_mask);
  if (even_os.sigaction(number, &action, NULL) != 0) {
    return even_fail_errno(errno, "no handler could be set for signal %d", number);
  }
  atomic_store(&stack_signal, number);
  return EVEN_OK;
}

/* ---- the writing thread ---- */

typedef struct text_page {
  char *text;
  size_t bytes;
  size_t *length;
} text_page;

static void EVEN_PRINTF(2, 3) add(text_page *page, const char *format, ...) {
  va_list arguments;
  size_t left = page->bytes - *page->length;
  va_start(arguments, format);
  int wrote = vsnprintf(page->text + *page->length, left, format, arguments);
  va_end(arguments);
  *page->length += wrote < 0 ? 0 : (size_t)wrote < left ? (size_t)wrote : left - 1;
}

/* The start of a small file of the thread's. */
static void read_file(int thread, const char *name, char *out, size_t bytes) {
  char path[64];
  (void)snprintf(path, sizeof path, "/proc/self/task/%d/%s", thread, name);
  int fd = even_os.open(path, O_RDONLY | O_CLOEXEC, 0);
  ssize_t got = fd < 0 ? 0 : even_os.read(fd, out, bytes - 1);
  out[got < 0 ? 0 : got] = '\0';
  if (fd >= 0) {
    (void)even_os.close(fd);
  }
}

static bool blocks(int thread, int number) {
  char status[2048];
  read_file(thread, "status", status, sizeof status);
  const char *mask = strstr(status, "SigBlk:");
  return mask == NULL || (strtoull(mask + 7, NULL, 16) >> (number - 1) & 1u) != 0;
}

typedef struct walk {
  int number;
  int self;
  int threads[MOST_THREADS];
  int slot_of[MOST_THREADS]; /* -1: was not asked */
  int count;
  int more;
  int next_slot;
} walk;

static int free_slot(walk *now) {
  while (now->next_slot < MOST_THREADS) {
    int i = now->next_slot++;
    if (atomic_load(&slots[i].state) == SLOT_FREE) {
      return i;
    }
  }
  return -1;
}

static bool ask(void *context, const char *name) {
  walk *now = context;
  int thread = (int)strtol(name, NULL, 10);
  if (thread <= 0 || thread == now->self) {
    return true;
  }
  if (now->count == MOST_THREADS) {
    now->more++;
    return true;
  }
  int slot = blocks(thread, now->number) ? -1 : free_slot(now);
  now->threads[now->count] = thread;
  now->slot_of[now->count++] = slot;
  if (slot >= 0) {
    atomic_store(&slots[slot].thread, thread);
    atomic_store(&slots[slot].state, SLOT_ASKED);
    if (even_os.tgkill(even_os.getpid(), thread, now->number) != 0) {
      atomic_store(&slots[slot].state, SLOT_FREE);
      now->slot_of[now->count - 1] = -1;
    }
  }
  return true;
}

static void wait_for_answers(const walk *now, uint64_t limit_ns) {
  const uint64_t deadline = even_clock_ns() + limit_ns;
  for (;;) {
    uint32_t seen = atomic_load(&answers);
    bool all = true;
    for (int i = 0; i < now->count; i++) {
      all = all && (now->slot_of[i] < 0 || atomic_load(&slots[now->slot_of[i]].state) == SLOT_TAKEN);
    }
    uint64_t at = even_clock_ns();
    if (all || at >= deadline) {
      return;
    }
    even_futex_wait(&answers, seen, deadline - at);
  }
}

static void write_frame(text_page *page, int depth, const void *address) {
  Dl_info where;
  if (dladdr(address, &where) == 0 || where.dli_fname == NULL) {
    add(page, "  #%-2d %p\n", depth, address);
    return;
  }
  const char *slash = strrchr(where.dli_fname, '/');
  const char *file = slash == NULL ? where.dli_fname : slash + 1;
  long offset = (long)((const char *)address - (const char *)where.dli_fbase);
  if (where.dli_sname != NULL) {
    add(page, "  #%-2d %s+0x%lx (%s+0x%lx)\n", depth, where.dli_sname,
        (unsigned long)((const char *)address - (const char *)where.dli_saddr), file, (unsigned long)offset);
  } else {
    add(page, "  #%-2d %s+0x%lx\n", depth, file, (unsigned long)offset);
  }
}

static void write_thread(text_page *page, int thread, int slot) {
  char name[NAME_BYTES];
  read_file(thread, "comm", name, sizeof name);
  name[strcspn(name, "\n")] = '\0';
  add(page, "thread %d (%s)", thread, name);
  if (slot < 0) {
    add(page, ": takes no signals\n");
    return;
  }
  int asked = SLOT_ASKED;
  if (atomic_compare_exchange_strong(&slots[slot].state, &asked, SLOT_FREE)) {
    add(page, ": did not answer\n");
  } else if (asked == SLOT_FILLS) { /* its own until it is done; the next time it may be free */
    add(page, ": did not finish its answer\n");
  } else {
    add(page, ":\n");
    for (int i = OWN_FRAMES; i < slots[slot].count; i++) {
      write_frame(page, i - OWN_FRAMES, slots[slot].frames[i]);
    }
    atomic_store(&slots[slot].state, SLOT_FREE);
  }
}

void even_thread_stacks_write(char *text, size_t bytes, size_t *length, uint64_t limit_ns) {
  text_page out = {text, bytes, length};
  walk now = {.number = atomic_load(&stack_signal), .self = (int)even_os.gettid()};
  struct sigaction handled;
  if (now.number == 0 || even_os.sigaction(now.number, NULL, &handled) != 0 || handled.sa_handler != take) {
    add(&out, "no C stacks: %s\n", now.number == 0 ? "nothing was set up for them" : "somebody else took their signal");
    return;
  }
  for (int i = 0; i < MOST_THREADS; i++) { /* answers that came too late the last time */
    int taken = SLOT_TAKEN;
    (void)atomic_compare_exchange_strong(&slots[i].state, &taken, SLOT_FREE);
  }
  if (even_folder_each("/proc/self/task", ask, &now) != EVEN_OK) {
    add(&out, "no C stacks: %s\n", even_error_last()->what);
    return;
  }
  wait_for_answers(&now, limit_ns);
  for (int i = 0; i < now.count; i++) {
    write_thread(&out, now.threads[i], now.slot_of[i]);
  }
  if (now.more > 0) {
    add(&out, "and %d more threads\n", now.more);
  }
}
