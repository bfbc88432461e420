/* Evenstep's balancer from C: three devices, measured once, and the split of a batch that ends soonest.
 *   cc shares.c $(pkg-config --cflags --libs evenstep) -o shares && ./shares */
#include <evenstep/evenstep.h>
#include <stdio.h>

int main(void) {
  /* seconds that each device took for 8 and for 32 samples */
  const int64_t samples[] = {8, 32};
  const double fast[] = {0.010, 0.034};
  const double slow[] = {0.036, 0.132};
  const double late[] = {0.030, 0.054}; /* quick, but each step costs it 22 ms before the first sample */
  const even_time_table tables[] = {{samples, fast, 2}, {samples, slow, 2}, {samples, late, 2}};
  int64_t shares[3];
  double seconds = 0;
  if (even_balancer_solve(tables, NULL, 3, 64, shares, &seconds) != EVEN_OK) {
    const even_error *error = even_error_last();
    (void)fprintf(stderr, "%s\n  fix: %s\n", error->what, error->fix);
    return even_status_exit_code(error->status);
  }
  (void)printf("shares %lld %lld %lld: %.1f ms a step\n", (long long)shares[0], (long long)shares[1],
               (long long)shares[2], seconds * 1e3);
  return 0;
}
