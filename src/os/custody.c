/* Messages of one fixed size over a pair of sockets that keep them apart; descriptors travel beside them. */
#include "os/custody.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <string.h>

/* More would be a mistake: a job of 4,096 ranks keeps four of each. */
enum { MOST_ITEMS = 65536, ROOM_MS = 100 };

typedef enum order_kind { KEEP, DROP, DROP_ALL } order_kind;

typedef struct order {
  uint32_t what;
  uint32_t kind;
  uint32_t number;
} order;

/* Room for one descriptor beside a message, aligned as the kernel wants it. */
typedef union companion {
  struct cmsghdr header;
  unsigned char bytes[CMSG_SPACE(sizeof(int))];
} companion;

void even_custody_open(even_custody *out) {
  *out = (even_custody){.socket = -1};
}

static void close_one(int *fd) {
  if (*fd >= 0) {
    (void)even_os.close(*fd);
  }
  *fd = -1;
}

/* All of a lower kind. */
static void release_below(even_custody *custody, uint32_t kind) {
  size_t left = 0;
  for (size_t i = 0; i < custody->count; i++) {
    if (custody->items[i].kind >= kind) {
      custody->items[left++] = custody->items[i];
    } else {
      close_one(&custody->items[i].fd);
    }
  }
  custody->count = left;
  custody->broken = false;
}

void even_custody_release(even_custody *custody) {
  release_below(custody, EVEN_CUSTODY_STAYS);
}

void even_custody_close(even_custody *custody) {
  release_below(custody, UINT32_MAX);
  even_free(custody->items);
  custody->items = NULL;
  close_one(&custody->socket);
}

static even_custody_item *find(const even_custody *custody, uint32_t kind, uint32_t number) {
  for (size_t i = 0; i < custody->count; i++) {
    if (custody->items[i].kind == kind && custody->items[i].number == number) {
      return &custody->items[i];
    }
  }
  return NULL;
}

/* ---- the parent ---- */

even_status even_custody_begin(even_custody *custody, int *child) {
  int ends[2] = {-1, -1};
  close_one(&custody->socket);
  *child = -1;
  if (even_os.socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return even_fail_errno(errno, "no socket to a process that is to be started");
  }
  custody->socket = ends[0];
  *child = ends[1];
  for (size_t i = 0; i < custody->count; i++) {
    custody->items[i].told = custody->items[i].ended; /* the child has a copy of it */
  }
  return EVEN_OK;
}

static void drop(even_custody *custody, uint32_t kind, uint32_t number) {
  even_custody_item *item = find(custody, kind, number);
  if (item != NULL) {
    close_one(&item->fd);
    *item = custody->items[--custody->count];
  }
}

/* Owns the descriptor. What cannot be kept is missed only by who asks for it later. */
static void keep(even_custody *custody, uint32_t kind, uint32_t number, int fd) {
  drop(custody, kind, number);
  if ((kind != 0 && fd < 0) || custody->count >= MOST_ITEMS ||
      even_realloc((void **)&custody->items, custody->count + 1, sizeof *custody->items) != EVEN_OK) {
    even_error_clear();
    close_one(&fd);
    custody->broken = true;
    return;
  }
  custody->items[custody->count++] = (even_custody_item){.kind = kind, .number = number, .fd = fd};
}

/* The descriptor that came along, -1: none, or there was no room for it. */
static int companion_of(struct msghdr *message) {
  int fd = -1;
  struct cmsghdr *header = CMSG_FIRSTHDR(message);
  if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
      header->cmsg_len == CMSG_LEN(sizeof fd)) {
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
  }
  return fd;
}

/* False: there is none now. */
static bool hear_one(even_custody *custody) {
  order asked;
  companion beside;
  struct iovec part = {.iov_base = &asked, .iov_len = sizeof asked};
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = &beside, .msg_controllen = sizeof beside.bytes};
  memset(&beside, 0, sizeof beside);
  ssize_t got = -1;
  do {
    got = even_os.recvmsg(custody->socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got <= 0) {
    return false;
  }
  int fd = companion_of(&message);
  if (got != (ssize_t)sizeof asked) {
    close_one(&fd);
    custody->broken = true;
  } else if (asked.what == KEEP) {
    keep(custody, asked.kind, asked.number, fd);
  } else {
    close_one(&fd);
    if (asked.what == DROP) {
      drop(custody, asked.kind, asked.number);
    } else {
      even_custody_release(custody);
    }
  }
  return true;
}

static bool tell_one(const even_custody *custody, const even_process_end *end) {
  struct iovec part = {.iov_base = (void *)end, .iov_len = sizeof *end};
  const struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  return even_os.sendmsg(custody->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof *end;
}

/* What the socket had no room for before. */
static void tell_rest(even_custody *custody) {
  for (size_t i = 0; i < custody->count; i++) {
    even_custody_item *item = &custody->items[i];
    if (item->kind == 0 && item->ended && !item->told) {
      item->told = tell_one(custody, &item->end);
    }
  }
}

void even_custody_hear(even_custody *custody) {
  if (custody->socket < 0) {
    return;
  }
  while (hear_one(custody)) {
  }
  tell_rest(custody);
}

void even_custody_tell(even_custody *custody, const even_process_end *end) {
  even_custody_hear(custody); /* it may have been asked for by now */
  even_custody_item *item = find(custody, 0, (uint32_t)end->pid);
  if (item == NULL || custody->socket < 0) {
    return;
  }
  if (end->stopped || end->continued) {
    (void)tell_one(custody, end); /* what it missed it sees by itself */
    return;
  }
  item->ended = true;
  item->end = *end;
  item->told = tell_one(custody, end);
}

/* ---- a child ---- */

void even_custody_join(even_custody *custody, int child) {
  close_one(&custody->socket);
  custody->socket = child;
  for (size_t i = 0; i < custody->count; i++) {
    custody->items[i].told = false;
  }
}

static even_status ask(const even_custody *custody, order_kind what, uint32_t kind, uint32_t number, int fd) {
  order asked = {.what = (uint32_t)what, .kind = kind, .number = number};
  companion beside;
  struct iovec part = {.iov_base = &asked, .iov_len = sizeof asked};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  memset(&beside, 0, sizeof beside);
  if (fd >= 0) {
    message.msg_control = &beside;
    message.msg_controllen = CMSG_LEN(sizeof fd);
    beside.header =
        (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(&beside.header), &fd, sizeof fd);
  }
  struct pollfd room = {.fd = custody->socket, .events = POLLOUT};
  ssize_t sent = -1;
  do {
    sent = even_os.sendmsg(custody->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && (errno == EINTR || (errno == EAGAIN && even_os.poll(&room, 1, ROOM_MS) > 0)));
  return sent == (ssize_t)sizeof asked
             ? EVEN_OK
             : even_fail_errno(errno, "process %ld, which starts this one's successor, cannot be told what to keep",
                               (long)even_os.getppid());
}

even_status even_custody_keep(even_custody *custody, uint32_t kind, uint32_t number, int fd) {
  if (kind == 0 || fd < 0) {
    return even_fail(EVEN_ERR_ARGUMENT, "descriptor %d of kind %u is to be kept", fd, kind);
  }
  return ask(custody, KEEP, kind, number, fd);
}

even_status even_custody_watch(even_custody *custody, pid_t pid) {
  return ask(custody, KEEP, 0, (uint32_t)pid, -1);
}

even_status even_custody_drop(even_custody *custody, uint32_t kind, uint32_t number) {
  return ask(custody, DROP, kind, number, -1);
}

even_status even_custody_drop_all(even_custody *custody) {
  return ask(custody, DROP_ALL, 0, 0, -1);
}

int even_custody_claim(even_custody *custody, uint32_t kind, uint32_t number) {
  even_custody_item *item = kind == 0 ? NULL : find(custody, kind, number);
  int fd = item == NULL ? -1 : item->fd;
  if (item != NULL) {
    item->fd = -1;
  }
  return fd;
}

bool even_custody_next(even_custody *custody, even_process_end *out) {
  for (size_t i = 0; i < custody->count; i++) {
    even_custody_item *item = &custody->items[i];
    if (item->kind == 0 && item->ended && !item->told) {
      item->told = true;
      *out = item->end;
      return true;
    }
  }
  struct iovec part = {.iov_base = out, .iov_len = sizeof *out};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  ssize_t got = -1;
  do {
    got = even_os.recvmsg(custody->socket, &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  return got == (ssize_t)sizeof *out;
}
