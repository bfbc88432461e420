/* How many descriptors this process has open, for tests that nothing stays open. */
#ifndef EVEN_TESTS_DESCRIPTORS_H
#define EVEN_TESTS_DESCRIPTORS_H

/* Counts the look itself, too: to be compared with another look. */
int open_descriptors(void);

#endif
