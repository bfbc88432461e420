/* How far a sender of messages may run ahead of a receiver that does not ask for them: what it has announced is
 * returned to it as the receiver takes it, and more than a pair's room is not announced. */
#include "comm/ucx/group.h"

#include "base/fail.h"

#include <string.h>

/* As the rings of shared memory have it. */
#define ROOM ((uint64_t)256 << 10)
#define LEAST_ROOM ((uint64_t)4 << 10)
#define ROOMY_RANKS 32
/* What a message takes beside its data. */
#define HEADER_ROOM 64u

static uint64_t room_of(const even_ucx_group *group) {
  uint64_t room = ROOM;
  for (int ranks = ROOMY_RANKS; ranks < group->ranks && room > LEAST_ROOM; ranks *= 2) {
    room /= 4;
  }
  return room > LEAST_ROOM ? room : LEAST_ROOM;
}

/* Returned are quarters of the room: a sender that has less than one on its way may send whatever it is, for it waits
 * for nothing that will be returned. */
bool even_ucx_has_room(const even_ucx_group *group, int peer, size_t bytes) {
  uint64_t room = room_of(group);
  uint64_t on_way = group->peers[peer].on_way;
  return on_way <= room / 4 || (bytes <= room && on_way + HEADER_ROOM + bytes <= room);
}

void even_ucx_take_room(even_ucx_group *group, int peer, size_t bytes) {
  group->peers[peer].on_way += HEADER_ROOM + bytes;
}

static void return_room(even_ucx_group *group, int to) {
  even_ucx_peer *peer = &group->peers[to];
  even_ucx_notice notice;
  if (to == group->rank) {
    peer->on_way -= peer->owed;
    peer->owed = 0;
    even_ucx_messages_start(group, to);
    return;
  }
  memset(&notice, 0, sizeof notice);
  notice.word = EVEN_UCX_RETURNS;
  notice.sender = group->rank;
  notice.room = peer->owed;
  const even_error kept = *even_error_last();
  if (even_ucx_post(group, to, &notice, offsetof(even_ucx_notice, room) + sizeof notice.room)) {
    peer->owed = 0;
  } else {
    group->owes = true; /* without memory: at the next occasion */
  }
  (void)even_error_restore(&kept);
}

void even_ucx_give_room_back(even_ucx_group *group, int sender, size_t bytes) {
  group->peers[sender].owed += HEADER_ROOM + bytes;
  if (group->peers[sender].owed > room_of(group) / 4) {
    return_room(group, sender);
  }
}

void even_ucx_give_owed_room_back(even_ucx_group *group) {
  if (!group->owes) {
    return;
  }
  group->owes = false;
  for (int rank = 0; rank < group->ranks; rank++) {
    const even_ucx_peer *peer = &group->peers[rank];
    if (peer->owed > room_of(group) / 4 && peer->failed == 0 && !peer->left) {
      return_room(group, rank);
    }
  }
}

void even_ucx_take_room_back(even_ucx_group *group, const even_ucx_notice *notice) {
  even_ucx_peer *peer = &group->peers[notice->sender];
  peer->on_way -= notice->room < peer->on_way ? notice->room : peer->on_way;
  even_ucx_messages_start(group, notice->sender);
}
