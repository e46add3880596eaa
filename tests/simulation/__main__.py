from tests.simulation.search import main

if __name__ == "__main__":
    main()
